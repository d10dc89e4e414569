# SPDX-License-Identifier: Apache-2.0
"""MLA decode on Blackwell: bf16 or FP8, paged latent cache, split plan on the device. Compiled, never run on hardware."""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import Any

import torch

from tokenspeed_plugin.kernels.mla.geometry import (
    HEAD_DIMS,
    LATENT_DIMS,
    ROPE_DIMS,
    TILE_TOKENS,
    RowTiles,
    plan_words,
)
from tokenspeed_plugin.kernels.mla.operands import require
from tokenspeed_plugin.kernels.mla.sm100.layout import ROW_COUNTS, DecodeLayout

ELEMENTS = {torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "float8_e4m3fn"}
MIN_PAGE_TOKENS = 16
"""A box of fewer tokens would not start at a multiple of the swizzle."""
PACKAGE = "nvidia_cutlass_dsl"
ARCHITECTURES = {(10, 0): "sm_100a", (10, 3): "sm_103a"}


def unavailable_reason() -> str | None:
    """Why the kernel cannot be compiled here, or None."""
    if importlib.util.find_spec(PACKAGE) is not None:
        return None
    return "the package nvidia-cutlass-dsl is not installed: pip install 'tokenspeed-plugin[blackwell]'"


class MlaWorkspace:
    """Parts of split requests. Launches that may overlap in time must not share one.

    Args:
        num_heads: query heads on this GPU, 1 to 128.
        max_query_tokens: query tokens of a request, at most (drafts count), 1 to 8.
        max_requests: requests of a batch, at most, padding included.
        device: the CUDA device.
        dtype: of cache and queries: torch.bfloat16 or torch.float8_e4m3fn.
    """

    def __init__(
        self,
        num_heads: int,
        max_query_tokens: int,
        max_requests: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if dtype not in ELEMENTS:
            raise ValueError(f"dtype={dtype}, allowed: {', '.join(map(str, ELEMENTS))}")
        self.device, self.dtype = torch.device(device), dtype
        self.num_heads, self.max_query_tokens, self.max_requests = num_heads, max_query_tokens, max_requests
        self.tiles = RowTiles.fold(num_heads, max_query_tokens, ROW_COUNTS)
        self.groups = self.tiles.groups(torch.cuda.get_device_properties(self.device).multi_processor_count)
        rows = 2 * self.groups * self.tiles.row_tiles * self.tiles.rows
        partial_dtype = torch.bfloat16 if self.tiles.rows == ROW_COUNTS[-1] else torch.float32  # partial_element
        self.partial_out = torch.empty(rows, LATENT_DIMS, dtype=partial_dtype, device=self.device)
        self.partial_lse = torch.empty(rows, dtype=torch.float32, device=self.device)
        starts = torch.arange(max_requests + 1, dtype=torch.int32, device=self.device)
        self.uniform_starts = starts * max_query_tokens


class MlaDecodePlan:
    """The split plan of one step in persistent memory: `update` fills it once, all layers read it.

    Args:
        workspace: its shapes are the plan's.
        num_requests: requests of the batch, padding included; at most the workspace's.
    """

    def __init__(self, workspace: MlaWorkspace, num_requests: int) -> None:
        if not 0 < num_requests <= workspace.max_requests:
            raise ValueError(f"num_requests={num_requests}, allowed: 1 to {workspace.max_requests}")
        self.workspace, self.num_requests = workspace, num_requests
        words = plan_words(workspace.groups, num_requests)
        self.words = torch.zeros(words, dtype=torch.int32, device=workspace.device)
        self.step: tuple[torch.Tensor, torch.Tensor, int] | None = None

    def update(self, seq_lens: torch.Tensor, block_table: torch.Tensor, page_tokens: int) -> None:
        """Plans the splits of a step.

        Args:
            seq_lens: [requests] int32, this step's tokens included; 0 pads. Must keep its contents until the last layer.
            block_table: [requests, pages per request] int32, likewise. Entries past a request's last page are never read.
            page_tokens: tokens of a page, a power of two of at least 16.
        """
        device = self.workspace.device
        require(seq_lens, "seq_lens", (self.num_requests,), torch.int32, device)
        require(block_table, "block_table", (self.num_requests, block_table.shape[1]), torch.int32, device)
        if page_tokens < MIN_PAGE_TOKENS or page_tokens & (page_tokens - 1):
            raise ValueError(f"page_tokens={page_tokens}, allowed: a power of two of at least {MIN_PAGE_TOKENS}")
        self.step = (seq_lens, block_table, page_tokens)
        launch(_plan_kernel(architecture(device)), "PLAN", None, self.values(), device)

    def values(self) -> dict[str, Any]:
        """Launch parameters that the step fixes, by name."""
        if self.step is None:
            raise ValueError("plan: update() has not been called")
        seq_lens, block_table, page_tokens = self.step
        return {
            "seq_lens": seq_lens.data_ptr(),
            "block_table": block_table.data_ptr(),
            "plan": self.words.data_ptr(),
            "table_stride": block_table.stride(0),
            "num_requests": self.num_requests,
            "page_shift": page_tokens.bit_length() - 1,
            "groups": self.workspace.groups,
        }


def mla_decode(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    plan: MlaDecodePlan,
    softmax_scale: float,
    *,
    query_starts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    output_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of each request's last query tokens over its cached latents.

    Args:
        q_nope: [tokens, heads, 512] of the workspace's type, already multiplied into the latent space.
        q_rope: [tokens, heads, 64], likewise.
        kv_cache: [pages, page_tokens, 576], likewise: 512 latent then 64 rope dims.
        plan: updated for this step.
        softmax_scale: factor of the scores, above 0; with FP8 the scales of query and cache are part of it.
        query_starts: [requests + 1] int32; None: every request has `workspace.max_query_tokens` tokens.
        out: [tokens, heads, 512] bf16 to write to.
        lse: [tokens, heads] fp32 to write to.
        output_scale: factor of the output: the scale of an FP8 cache.

    Returns:
        out and lse (natural logarithm). Rows that may read no KV are zero with lse -inf, and so are rows past the last
        request.

    Raises:
        ValueError: a shape, type or layout is not what the kernel takes; nothing was launched.
    """
    workspace, tokens = plan.workspace, q_nope.shape[0]
    step, heads, device = plan.values(), workspace.num_heads, workspace.device
    page_tokens = 1 << step["page_shift"]
    require(q_nope, "q_nope", (tokens, heads, LATENT_DIMS), workspace.dtype, device)
    require(q_rope, "q_rope", (tokens, heads, ROPE_DIMS), workspace.dtype, device)
    require(kv_cache, "kv_cache", (kv_cache.shape[0], page_tokens, HEAD_DIMS), workspace.dtype, device)
    for name, tensor in (("q_nope", q_nope), ("q_rope", q_rope), ("kv_cache", kv_cache)):
        require_aligned(tensor, name)
    if not softmax_scale > 0.0:
        raise ValueError(f"softmax_scale={softmax_scale}, allowed: above 0")
    if query_starts is None:
        query_starts = workspace.uniform_starts[: plan.num_requests + 1]
        if tokens < plan.num_requests * workspace.max_query_tokens:
            raise ValueError(
                f"q_nope has {tokens} tokens, {plan.num_requests} x {workspace.max_query_tokens} are planned"
            )
    require(query_starts, "query_starts", (plan.num_requests + 1,), torch.int32, device)
    if out is None:
        out = torch.empty(tokens, heads, LATENT_DIMS, dtype=torch.bfloat16, device=device)
    if lse is None:
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=device)
    require(out, "out", tuple(q_nope.shape), torch.bfloat16, device)
    require(lse, "lse", (tokens, heads), torch.float32, device)
    if not lse.is_contiguous():
        raise ValueError(f"lse: strides {lse.stride()}, allowed: contiguous")
    values = {
        **step,
        "q_nope": q_nope.data_ptr(),
        "q_rope": q_rope.data_ptr(),
        "kv_cache": kv_cache.data_ptr(),
        "out": out.data_ptr(),
        "lse": lse.data_ptr(),
        "query_starts": query_starts.data_ptr(),
        "partial_out": workspace.partial_out.data_ptr(),
        "partial_lse": workspace.partial_lse.data_ptr(),
        "q_nope_strides": q_nope.stride()[:2],
        "q_rope_strides": q_rope.stride()[:2],
        "kv_strides": kv_cache.stride()[:2],
        "out_strides": out.stride()[:2],
        "num_tokens": tokens,
        "num_pages": kv_cache.shape[0],
        "scale_log2": softmax_scale * math.log2(math.e),
        "output_scale": output_scale,
    }
    shape = (heads, workspace.max_query_tokens, min(page_tokens, TILE_TOKENS), ELEMENTS[workspace.dtype])
    arch = architecture(device)
    launch(_decode_kernel(*shape, arch), "DECODE", _variant(*shape), values, device)
    launch(_merge_kernel(*shape, arch), "MERGE", _variant(*shape), values, device)
    return out, lse


def require_aligned(tensor: torch.Tensor, name: str) -> None:
    """Check what the bulk copies and the 16-byte loads rely on.

    Raises:
        ValueError: the address or a stride is not a multiple of 16 bytes.
    """
    units = 16 // tensor.element_size()
    if tensor.data_ptr() % 16 or any(stride % units for stride in tensor.stride()[:-1]):
        raise ValueError(f"{name}: its address and strides must be multiples of 16 bytes")


def architecture(device: torch.device) -> str:
    """The compiler's name of a device's architecture.

    Raises:
        ValueError: it is no Blackwell that the kernels are for.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability not in ARCHITECTURES:
        allowed = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
        raise ValueError(f"{device}: compute capability {capability[0]}.{capability[1]}, allowed: {allowed}")
    return ARCHITECTURES[capability]


@functools.cache
def _variant(num_heads: int, max_query_tokens: int, box_tokens: int, element: str) -> Any:
    from tokenspeed_plugin.kernels.mla.sm100.operands import DecodeVariant

    tiles = RowTiles.fold(num_heads, max_query_tokens, ROW_COUNTS)
    return DecodeVariant(num_heads, max_query_tokens, box_tokens, tiles, DecodeLayout.fitted(tiles.rows, element))


@functools.cache
def _decode_kernel(num_heads: int, max_query_tokens: int, box_tokens: int, element: str, arch: str) -> Any:
    from tokenspeed_plugin.kernels.mla.sm100.compiling import compile_decode

    return compile_decode(_variant(num_heads, max_query_tokens, box_tokens, element), arch=arch)


@functools.cache
def _merge_kernel(num_heads: int, max_query_tokens: int, box_tokens: int, element: str, arch: str) -> Any:
    from tokenspeed_plugin.kernels.mla.sm100.compiling import compile_merge

    return compile_merge(_variant(num_heads, max_query_tokens, box_tokens, element), arch=arch)


@functools.cache
def _plan_kernel(arch: str) -> Any:
    from tokenspeed_plugin.kernels.mla.sm100.compiling import compile_plan

    return compile_plan(arch=arch)


def launch(compiled: Any, parameters: str, variant: Any, values: dict[str, Any], device: torch.device) -> None:
    """Launch a compiled kernel on the current stream; `parameters` names a tuple of `compiling`."""
    from tokenspeed_plugin.kernels.mla.sm100 import compiling

    stream = torch.cuda.current_stream(device).cuda_stream
    compiled(*compiling.arguments(getattr(compiling, parameters), variant, values, stream))
