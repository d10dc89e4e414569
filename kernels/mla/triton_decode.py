# SPDX-License-Identifier: Apache-2.0
"""MLA decode in Triton: the portable tier. Split KV, any page size, LSE, safe to capture in a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from tokenspeed_plugin.kernels.mla.geometry import LATENT_DIMS, ROPE_DIMS

BLOCK_ROWS, BLOCK_TOKENS, MERGE_SPLITS = 16, 32, 16


@triton.jit  # type: ignore[untyped-decorator]
def decode_split(  # type: ignore[no-untyped-def]
    q_nope, q_rope, kv, table, seq_lens, query_starts, partial_out, partial_lse,
    q_nope_token, q_nope_head, q_rope_token, q_rope_head, kv_page, kv_token, table_stride,
    max_queries, scale_log2, num_splits,
    num_heads: tl.constexpr, page_tokens: tl.constexpr, varlen: tl.constexpr,
    latent_dims: tl.constexpr, rope_dims: tl.constexpr, block_rows: tl.constexpr, block_tokens: tl.constexpr,
):  # fmt: skip
    """One program: `block_rows` folded query rows of a request, one contiguous part of its KV."""
    request, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(seq_lens + request)
    if varlen:
        start = tl.load(query_starts + request)
        queries = tl.load(query_starts + request + 1) - start
    else:
        start = request * max_queries
        queries = max_queries
    row = tile * block_rows + tl.arange(0, block_rows)
    real = row < queries * num_heads
    token = (start + row // num_heads).to(tl.int64)
    head = row % num_heads
    latent, rope = tl.arange(0, latent_dims), tl.arange(0, rope_dims)
    qn = tl.load(q_nope + (token * q_nope_token + head * q_nope_head)[:, None] + latent[None, :], real[:, None], 0.0)
    qr = tl.load(q_rope + (token * q_rope_token + head * q_rope_head)[:, None] + rope[None, :], real[:, None], 0.0)
    visible = length - (queries - 1 - row // num_heads)

    share = tl.cdiv(tl.cdiv(length, block_tokens), num_splits) * block_tokens
    first = split * share
    last = tl.minimum(first + share, length)
    top = tl.full([block_rows], -float("inf"), tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    out = tl.zeros([block_rows, latent_dims], tl.float32)
    for at in range(first, last, block_tokens):
        position = at + tl.arange(0, block_tokens)
        inside = position < last
        page = tl.load(table + request.to(tl.int64) * table_stride + position // page_tokens, inside, 0).to(tl.int64)
        base = kv + page * kv_page + (position % page_tokens) * kv_token
        keys = tl.load(base[:, None] + latent[None, :], inside[:, None], 0.0)
        rotary = tl.load(base[:, None] + latent_dims + rope[None, :], inside[:, None], 0.0)
        scores = (tl.dot(qn, tl.trans(keys)) + tl.dot(qr, tl.trans(rotary))) * scale_log2
        scores = tl.where(inside[None, :] & (position[None, :] < visible[:, None]), scores, -float("inf"))
        fresh = tl.maximum(top, tl.max(scores, 1))
        bound = tl.where(fresh == -float("inf"), 0.0, fresh)
        probs = tl.exp2(scores - bound[:, None])
        factor = tl.exp2(top - bound)
        total = total * factor + tl.sum(probs, 1)
        out = out * factor[:, None] + tl.dot(probs.to(keys.dtype), keys)
        top = fresh
    safe = tl.where(total > 0.0, total, 1.0)
    slot = ((request.to(tl.int64) * num_splits + split) * tl.num_programs(1) + tile) * block_rows + tl.arange(
        0, block_rows
    )
    tl.store(partial_out + slot[:, None] * latent_dims + latent[None, :], out / safe[:, None])
    tl.store(partial_lse + slot, tl.where(total > 0.0, top + tl.log2(safe), -float("inf")))


@triton.jit  # type: ignore[untyped-decorator]
def merge_splits(  # type: ignore[no-untyped-def]
    partial_out, partial_lse, out, lse, query_starts, out_token, out_head,
    max_queries, num_requests, num_splits, row_tiles,
    num_heads: tl.constexpr, varlen: tl.constexpr, latent_dims: tl.constexpr, block_rows: tl.constexpr, block_splits: tl.constexpr,
):  # fmt: skip
    """One program: one (token, head) of the batch, padding included."""
    token, head = tl.program_id(0), tl.program_id(1)
    if varlen:
        request, row = num_requests + token * 0, head
        for candidate in range(num_requests):
            begin, end = tl.load(query_starts + candidate), tl.load(query_starts + candidate + 1)
            inside = (token >= begin) & (token < end)
            request = tl.where(inside, candidate, request)
            row = tl.where(inside, (token - begin) * num_heads + head, row)
    else:
        request = token // max_queries
        row = (token % max_queries) * num_heads + head
    limit = tl.where(request < num_requests, num_splits, 0)  # padding has no splits
    latent = tl.arange(0, latent_dims)
    slot = (request.to(tl.int64) * num_splits * row_tiles + row // block_rows) * block_rows + row % block_rows
    top = -float("inf")
    total = 0.0
    acc = tl.zeros([latent_dims], tl.float32)
    for first in range(0, num_splits, block_splits):
        split = first + tl.arange(0, block_splits)
        there = split < limit
        at = slot + split.to(tl.int64) * row_tiles * block_rows
        states = tl.load(partial_lse + at, there, -float("inf"))
        values = tl.load(partial_out + at[:, None] * latent_dims + latent[None, :], there[:, None], 0.0)
        fresh = tl.maximum(top, tl.max(states, 0))
        bound = tl.where(fresh == -float("inf"), 0.0, fresh)
        weights = tl.exp2(states - bound)
        factor = tl.exp2(top - bound)
        acc = acc * factor + tl.sum(weights[:, None] * values, 0)
        total = total * factor + tl.sum(weights, 0)
        top = fresh
    safe = tl.where(total > 0.0, total, 1.0)
    tl.store(out + token.to(tl.int64) * out_token + head * out_head + latent, (acc / safe).to(out.dtype.element_ty))
    natural = (top + tl.log2(safe)) * 0.6931471805599453
    tl.store(lse + token.to(tl.int64) * num_heads + head, tl.where(total > 0.0, natural, -float("inf")))


def mla_decode_triton(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    *,
    max_query_tokens: int = 1,
    query_starts: torch.Tensor | None = None,
    num_splits: int = 16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of each request's last query tokens over its cached latents; see `mla_decode_reference`.

    Args:
        q_nope: [tokens, heads, 512], already multiplied into the latent space.
        q_rope: [tokens, heads, 64].
        kv_cache: [pages, page_tokens, 576], of the queries' type.
        block_table: [requests, pages per request] int32; entries past a request's last page are never read.
        seq_lens: [requests] int32, this step's tokens included; 0 pads.
        softmax_scale: factor of the scores.
        max_query_tokens: tokens of a request, at most; of every request without `query_starts`.
        query_starts: [requests + 1] int32.
        num_splits: parts into which each request's KV is cut.

    Returns:
        out [tokens, heads, 512] of the queries' type and lse [tokens, heads] fp32 (natural logarithm).
    """
    (tokens, heads, _), requests = q_nope.shape, seq_lens.shape[0]
    row_tiles = triton.cdiv(max_query_tokens * heads, BLOCK_ROWS)
    slots = requests * num_splits * row_tiles * BLOCK_ROWS
    partial_out = torch.empty(slots, LATENT_DIMS, dtype=torch.float32, device=q_nope.device)
    partial_lse = torch.empty(slots, dtype=torch.float32, device=q_nope.device)
    out = torch.empty(tokens, heads, LATENT_DIMS, dtype=q_nope.dtype, device=q_nope.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q_nope.device)
    starts = seq_lens if query_starts is None else query_starts
    strides: tuple[Any, ...] = (
        *q_nope.stride()[:2],
        *q_rope.stride()[:2],
        *kv_cache.stride()[:2],
        block_table.stride(0),
    )
    decode_split[(requests, row_tiles, num_splits)](
        q_nope, q_rope, kv_cache, block_table, seq_lens, starts, partial_out, partial_lse,
        *strides, max_query_tokens, softmax_scale * 1.4426950408889634, num_splits,
        num_heads=heads, page_tokens=kv_cache.shape[1], varlen=query_starts is not None,
        latent_dims=LATENT_DIMS, rope_dims=ROPE_DIMS, block_rows=BLOCK_ROWS, block_tokens=BLOCK_TOKENS,
    )  # fmt: skip
    merge_splits[(tokens, heads)](
        partial_out, partial_lse, out, lse, starts, *out.stride()[:2],
        max_query_tokens, requests, num_splits, row_tiles,
        num_heads=heads, varlen=query_starts is not None, latent_dims=LATENT_DIMS, block_rows=BLOCK_ROWS, block_splits=MERGE_SPLITS,
    )  # fmt: skip
    return out, lse
