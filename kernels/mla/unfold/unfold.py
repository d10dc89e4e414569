# SPDX-License-Identifier: Apache-2.0
"""Launches of the kernel that makes keys and values of paged latents; the kernel is in `csrc/unfold.cuh`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tokenspeed_plugin.kernels.mla.cached_prefill.groups import KEY_DIMS, NOPE_DIMS, VALUE_DIMS, Group
from tokenspeed_plugin.kernels.mla.geometry import HEAD_DIMS, LATENT_DIMS
from tokenspeed_plugin.kernels.mla.operands import require
from tokenspeed_plugin.kernels.mla.unfold import library
from tokenspeed_plugin.kernels.mla.unfold.abi import Params, UnfoldLibrary
from tokenspeed_plugin.kernels.mla.unfold.tiles import TILE_FIELDS, plan_tiles

MIN_PAGE_TOKENS = 16
"""A page is a box of a copy, of which a tile takes up to eight."""
_ALIGNED_BYTES = 16
"""Of addresses and strides that the copy engine takes."""


class Launches:
    """The launches of one device, all on streams of one thread.

    A launch copies its parameters, so one block of them serves all.
    """

    def __init__(self, built: UnfoldLibrary, device: torch.device) -> None:
        """Load the kernel."""
        self.device, self._library = device, built
        self._params = Params(clusters=built.prepare(device.index))

    def __call__(
        self,
        kv_cache: torch.Tensor,
        weights: torch.Tensor,
        block_table: torch.Tensor,
        tiles: torch.Tensor,
        page_tokens: int,
        rows: torch.Tensor,
        *,
        rope: bool,
    ) -> None:
        """Keys and values of all tokens of a batch and of some heads.

        Args:
            kv_cache: [pages, page_tokens, 576] bf16. What lies behind a request's end in its last page is read with the page,
                and no result depends on it.
            weights: [heads, 256, 512] bf16, contiguous: of each head 128 rows for keys, then 128 for values.
            block_table: [requests, pages per request] int32; entries past a request's last page are never read.
            tiles: of the batch, see `plan_tiles`.
            page_tokens: tokens of a page, a power of two from 16 on.
            rows: [2 x heads, tokens, 192] bf16: keys of a head, whose last 64 dims are the rope part, then its values, whose last
                64 dims stay as they are. Overwritten.
            rope: whether the rope part is written; it is the same for all heads, so a place that had other heads before keeps it.

        Raises:
            ValueError: an operand is not what the kernel takes; nothing was launched.
        """
        check_operands(kv_cache, weights, block_table, tiles, page_tokens, rows, self.device)
        params = self._params
        params.kv_cache, params.weights, params.rows = kv_cache.data_ptr(), weights.data_ptr(), rows.data_ptr()
        params.block_table, params.tiles = block_table.data_ptr(), tiles.data_ptr()
        params.page_stride, params.token_stride, _ = kv_cache.stride()
        params.row_stride, params.row_token_stride, _ = rows.stride()
        params.table_stride = block_table.stride(0)
        params.num_tokens, params.num_heads, params.num_pages = rows.shape[1], weights.shape[0], kv_cache.shape[0]
        params.num_tiles, params.page_shift = tiles.shape[0], page_tokens.bit_length() - 1
        params.write_rope = int(rope)
        self._library.run(self.device.index, params, torch.cuda.current_stream(self.device).cuda_stream)


@dataclass(frozen=True)
class PagedUnfold:
    """Keys and values of one group of requests by the kernel; see `Making` in `cached_prefill/making.py`.

    Attributes:
        launches: of the device.
        block_table: [requests, pages per request] int32; entries past a request's last page are never read.
        tiles: see `plan_tiles`, on the device.
        page_tokens: tokens of a page.
    """

    launches: Launches
    block_table: torch.Tensor
    tiles: torch.Tensor
    page_tokens: int

    def __call__(
        self,
        kv_cache: torch.Tensor,
        weights: torch.Tensor,
        latents: torch.Tensor,
        unfolded: torch.Tensor,
        first: bool,
    ) -> None:
        """Launch the kernel. `latents` are not needed: it takes them from their pages.

        Raises:
            ValueError: an operand is not what the kernel takes; nothing was launched.
        """
        del latents
        self.launches(kv_cache, weights, self.block_table, self.tiles, self.page_tokens, unfolded, rope=first)


def check_operands(
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    block_table: torch.Tensor,
    tiles: torch.Tensor,
    page_tokens: int,
    rows: torch.Tensor,
    device: torch.device,
) -> None:
    """See `Launches`.

    Raises:
        ValueError: an operand is not what the kernel takes.
    """
    check_page_tokens(page_tokens)
    heads = weights.shape[0]
    require(kv_cache, "kv_cache", (kv_cache.shape[0], page_tokens, HEAD_DIMS), torch.bfloat16, device)
    require(weights, "weights", (heads, NOPE_DIMS + VALUE_DIMS, LATENT_DIMS), torch.bfloat16, device)
    require(rows, "rows", (2 * heads, *rows.shape[1:2], KEY_DIMS), torch.bfloat16, device)
    require(block_table, "block_table", (block_table.shape[0], block_table.shape[-1]), torch.int32, device)
    require(tiles, "tiles", (tiles.shape[0], len(TILE_FIELDS)), torch.int32, device)
    for name, packed in (("weights", weights), ("tiles", tiles)):
        if not packed.is_contiguous():
            raise ValueError(f"{name}: strides {packed.stride()}, allowed: contiguous")
    for name, operand in (("kv_cache", kv_cache), ("weights", weights), ("rows", rows), ("tiles", tiles)):
        steps = (operand.data_ptr(), *(stride * operand.element_size() for stride in operand.stride()[:-1]))
        if any(step % _ALIGNED_BYTES for step in steps):
            raise ValueError(f"{name}: address and strides of {steps} bytes, allowed: multiples of {_ALIGNED_BYTES}")


def check_page_tokens(page_tokens: int) -> None:
    """Check a page size.

    Raises:
        ValueError: the kernel does not take it.
    """
    if page_tokens < MIN_PAGE_TOKENS or page_tokens & (page_tokens - 1):
        raise ValueError(f"page_tokens: {page_tokens}, allowed: powers of two from {MIN_PAGE_TOKENS} on")


def paged_unfold(group: Group, block_table: torch.Tensor, kv_starts: torch.Tensor, page_tokens: int) -> PagedUnfold:
    """Plan a group of requests, once per step: one small copy to the device; builds the library first if need be.

    Args:
        group: the requests.
        block_table: theirs, on the device.
        kv_starts: not needed: the plan is made on the CPU.
        page_tokens: tokens of a page.

    Raises:
        ValueError: the kernel does not take the page size.
        LibraryUnavailableError: see `CudaSources.build`.
    """
    del kv_starts
    check_page_tokens(page_tokens)
    tiles = plan_tiles(group.kv_starts).pin_memory().to(block_table.device, non_blocking=True)
    return PagedUnfold(of_device(block_table.device), block_table, tiles, page_tokens)


@functools.cache
def of_device(device: torch.device) -> Launches:
    """The launches of a device; the library is built first if need be.

    Raises:
        LibraryUnavailableError: see `CudaSources.build`.
    """
    return Launches(library.load(), device)
