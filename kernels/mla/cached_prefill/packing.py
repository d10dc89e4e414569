# SPDX-License-Identifier: Apache-2.0
"""Gathers paged latents in the order of the batch, and puts the rope part of every token behind the keys of all heads."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from tokenspeed_plugin.kernels.mla.cached_prefill.groups import NOPE_DIMS
from tokenspeed_plugin.kernels.mla.geometry import LATENT_DIMS, ROPE_DIMS

SLOT_TOKENS, GATHER_TOKENS = 256, 32
"""Tokens of a program."""


@triton.jit  # type: ignore[untyped-decorator]
def find_slots(table, kv_starts, slots, table_stride, page_tokens: tl.constexpr, block_tokens: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program: slots of `block_tokens` tokens of a request; entries past its last page are never read."""
    request = tl.program_id(0)
    first = tl.load(kv_starts + request)
    length = tl.load(kv_starts + request + 1) - first
    position = tl.program_id(1) * block_tokens + tl.arange(0, block_tokens)
    real = position < length
    page = tl.load(table + request.to(tl.int64) * table_stride + position // page_tokens, real, 0)
    tl.store(slots + first + position, page.to(tl.int64) * page_tokens + position % page_tokens, real)


@triton.jit  # type: ignore[untyped-decorator]
def gather_tokens(  # type: ignore[no-untyped-def]
    kv, slots, latents, keys, num_tokens, num_heads, kv_page, kv_token, keys_token, keys_head,
    page_tokens: tl.constexpr, latent_dims: tl.constexpr, rope_dims: tl.constexpr, nope_dims: tl.constexpr,
    block_tokens: tl.constexpr,
):  # fmt: skip
    """One program: latents of `block_tokens` tokens side by side, their rope parts once for each head."""
    token = tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)
    real = (token < num_tokens)[:, None]
    slot = tl.load(slots + token, token < num_tokens, 0)
    base = (kv + (slot // page_tokens) * kv_page + (slot % page_tokens) * kv_token)[:, None]
    wide = token.to(tl.int64)[:, None]
    latent, rope = tl.arange(0, latent_dims)[None, :], tl.arange(0, rope_dims)[None, :]
    rotary = tl.load(base + latent_dims + rope, real)
    tl.store(latents + wide * latent_dims + latent, tl.load(base + latent, real), real)
    at = keys + wide * keys_token + nope_dims + rope
    for _ in range(num_heads):
        tl.store(at, rotary, real)
        at += keys_head


def token_slots(
    block_table: torch.Tensor, kv_starts: torch.Tensor, num_tokens: int, longest: int, page_tokens: int
) -> torch.Tensor:
    """The cache slot of every KV token of a batch, request by request.

    Args:
        block_table: [requests, pages per request] int32.
        kv_starts: [requests + 1] int32.
        num_tokens: KV tokens of the batch.
        longest: KV tokens of the longest request.
        page_tokens: tokens of a page.

    Returns:
        [num_tokens] int64.
    """
    slots = torch.empty(num_tokens, dtype=torch.int64, device=block_table.device)
    grid = (block_table.shape[0], triton.cdiv(longest, SLOT_TOKENS))
    find_slots[grid](
        block_table, kv_starts, slots, block_table.stride(0), page_tokens=page_tokens, block_tokens=SLOT_TOKENS
    )
    return slots


def gather(kv_cache: torch.Tensor, slots: torch.Tensor, latents: torch.Tensor, keys: torch.Tensor) -> None:
    """Fill `latents` and the rope part of `keys`.

    Args:
        kv_cache: [pages, page_tokens, 576].
        slots: [tokens] int64.
        latents: [tokens, 512], contiguous.
        keys: [tokens, heads, 192]; dims 128 to 191 are written.
    """
    tokens, heads, _ = keys.shape
    gather_tokens[(triton.cdiv(tokens, GATHER_TOKENS),)](
        kv_cache, slots, latents, keys, tokens, heads, *kv_cache.stride()[:2], *keys.stride()[:2],
        page_tokens=kv_cache.shape[1], latent_dims=LATENT_DIMS, rope_dims=ROPE_DIMS, nope_dims=NOPE_DIMS,
        block_tokens=GATHER_TOKENS,
    )  # fmt: skip


def token_slots_torch(
    block_table: torch.Tensor, kv_starts: torch.Tensor, num_tokens: int, longest: int, page_tokens: int
) -> torch.Tensor:
    """`token_slots` in torch: for CPUs, and the definition that the kernel is held against."""
    del longest
    counts = (kv_starts[1:] - kv_starts[:-1]).long()
    requests = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    positions = torch.arange(num_tokens, device=counts.device) - kv_starts[:-1].long()[requests]
    pages = block_table[requests, positions // page_tokens].long()
    return pages * page_tokens + positions % page_tokens


def gather_torch(kv_cache: torch.Tensor, slots: torch.Tensor, latents: torch.Tensor, keys: torch.Tensor) -> None:
    """`gather` in torch: for CPUs, and the definition that the kernel is held against."""
    page_tokens = kv_cache.shape[1]
    found = kv_cache[slots // page_tokens, slots % page_tokens]
    latents.copy_(found[:, :LATENT_DIMS])
    keys[..., NOPE_DIMS:] = found[:, None, LATENT_DIMS:]
