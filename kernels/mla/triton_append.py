# SPDX-License-Identifier: Apache-2.0
"""The append to the paged latent cache in Triton, the portable tier: RMS norm, rotation of keys and queries, and write in one launch.

Right under Triton's interpreter and compiled in CI for the GPUs that it claims.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

BLOCK_HEADS = 16
E4M3_LIMIT = tl.constexpr(448.0)


@triton.jit  # type: ignore[untyped-decorator]
def load_pairs(at, wanted, rows: tl.constexpr, rope_dims: tl.constexpr, interleaved: tl.constexpr):  # type: ignore[no-untyped-def]
    """First and second members of the pairs of `rows` vectors that begin at the pointers `at`, in fp32."""
    if interleaved:
        dim = tl.arange(0, rope_dims)
        whole = tl.load(at[:, None] + dim[None, :], wanted[:, None], 0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(whole, (rows, rope_dims // 2, 2)))
    else:
        pair = tl.arange(0, rope_dims // 2)
        first = tl.load(at[:, None] + pair[None, :], wanted[:, None], 0.0).to(tl.float32)
        second = tl.load(at[:, None] + rope_dims // 2 + pair[None, :], wanted[:, None], 0.0).to(tl.float32)
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def store_pairs(at, first, second, wanted, rows: tl.constexpr, rope_dims: tl.constexpr, interleaved: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write what `load_pairs` has read back in its order, in the type that `at` points to."""
    if interleaved:
        dim = tl.arange(0, rope_dims)
        whole = tl.reshape(tl.join(first, second), (rows, rope_dims))
        tl.store(at[:, None] + dim[None, :], whole.to(at.dtype.element_ty), wanted[:, None])
    else:
        pair = tl.arange(0, rope_dims // 2)
        tl.store(at[:, None] + pair[None, :], first.to(at.dtype.element_ty), wanted[:, None])
        tl.store(at[:, None] + rope_dims // 2 + pair[None, :], second.to(at.dtype.element_ty), wanted[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def quantised(values, scale, is_quantised: tl.constexpr):  # type: ignore[no-untyped-def]
    """What an e4m3 cache keeps of values, and what others keep: the values; in fp32."""
    wide = values.to(tl.float32)
    if is_quantised:
        wide = tl.clamp(wide / tl.load(scale), -E4M3_LIMIT, E4M3_LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return wide


@triton.jit(do_not_specialize=["num_slots"])  # type: ignore[untyped-decorator]
def append_tokens(  # type: ignore[no-untyped-def]
    q, latent, positions, weight, table, cache, slots, scale, out_latent, out_key,
    num_slots, page_tokens, epsilon, q_token, q_head, latent_token, table_row, cache_page, cache_token,
    num_heads: tl.constexpr, nope_dims: tl.constexpr, latent_dims: tl.constexpr, rope_dims: tl.constexpr,
    block_heads: tl.constexpr, interleaved: tl.constexpr, has_weight: tl.constexpr, is_quantised: tl.constexpr,
):  # fmt: skip
    """One program: a token's latent and key (part 0), or `block_heads` of its query heads (the others)."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, rope_dims // 2)
    row = table + tl.load(positions + token) * table_row
    cos = tl.load(row + pair).to(tl.float32)[None, :]
    sin = tl.load(row + rope_dims // 2 + pair).to(tl.float32)[None, :]
    if part > 0:
        head = (part - 1) * block_heads + tl.arange(0, block_heads)
        heads_at = q + token * q_token + head.to(tl.int64) * q_head + nope_dims
        left, right = load_pairs(heads_at, head < num_heads, block_heads, rope_dims, interleaved)
        store_pairs(heads_at, left * cos - right * sin, right * cos + left * sin, head < num_heads,
                    block_heads, rope_dims, interleaved)  # fmt: skip
    else:
        dim = tl.arange(0, latent_dims)
        values = tl.load(latent + token * latent_token + dim).to(tl.float32)
        values = values * tl.rsqrt(tl.sum(values * values, 0) / latent_dims + epsilon)
        if has_weight:
            values = values * tl.load(weight + dim).to(tl.float32)
        normed = values.to(out_latent.dtype.element_ty)
        tl.store(out_latent + token * latent_dims + dim, normed)
        one = tl.arange(0, 1)
        is_there = one == 0
        key_at = latent + token * latent_token + latent_dims + one
        first, second = load_pairs(key_at, is_there, 1, rope_dims, interleaved)
        turned = (first * cos - second * sin).to(out_key.dtype.element_ty)
        other = (second * cos + first * sin).to(out_key.dtype.element_ty)
        store_pairs(out_key + token * rope_dims + one, turned, other, is_there, 1, rope_dims, interleaved)
        slot = tl.load(slots + token, token < num_slots, -1)
        if slot >= 0:
            to = cache + (slot // page_tokens) * cache_page + (slot % page_tokens) * cache_token
            tl.store(to + dim, quantised(normed, scale, is_quantised).to(cache.dtype.element_ty))
            store_pairs(to + latent_dims + one, quantised(turned, scale, is_quantised),
                        quantised(other, scale, is_quantised), is_there, 1, rope_dims, interleaved)  # fmt: skip


def mla_append_triton(
    q: torch.Tensor,
    latent: torch.Tensor,
    positions: torch.Tensor,
    norm_weight: torch.Tensor | None,
    epsilon: float,
    rope_table: torch.Tensor,
    kv_cache: torch.Tensor | None,
    slots: torch.Tensor | None,
    *,
    interleaved: bool,
    kv_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries in place, norm and rotate new latents, and write them into the cache; see `mla_append_reference`.

    Latent and rope sizes are powers of two; the last dimension of every operand is contiguous. Nothing depends on host values
    beyond shapes, so the launch can be captured.

    Raises:
        ValueError: an e4m3 cache without a scale.
    """
    (tokens, heads, dims), rope_dims = q.shape, rope_table.shape[1]
    latent_dims = latent.shape[1] - rope_dims
    normed = torch.empty(tokens, latent_dims, dtype=latent.dtype, device=latent.device)
    key = torch.empty(tokens, rope_dims, dtype=latent.dtype, device=latent.device)
    if kv_cache is not None and kv_cache.dtype == torch.float8_e4m3fn and kv_scale is None:
        raise ValueError("kv_scale is None, allowed for an e4m3 cache: [1] fp32")
    if tokens == 0:
        return normed, key
    # Without a cache the pointers stand for nothing: no slot is looked at.
    cache = normed[:, None] if kv_cache is None else kv_cache
    num_slots = 0 if kv_cache is None or slots is None else slots.shape[0]
    append_tokens[(tokens, 1 + triton.cdiv(heads, BLOCK_HEADS))](
        q, latent, positions, latent if norm_weight is None else norm_weight, rope_table, cache,
        positions if slots is None else slots, rope_table if kv_scale is None else kv_scale, normed, key,
        num_slots, cache.shape[1], epsilon, *q.stride()[:2], latent.stride(0), rope_table.stride(0), *cache.stride()[:2],
        num_heads=heads, nope_dims=dims - rope_dims, latent_dims=latent_dims, rope_dims=rope_dims, block_heads=BLOCK_HEADS,
        interleaved=interleaved, has_weight=norm_weight is not None, is_quantised=cache.dtype == torch.float8_e4m3fn,
    )  # fmt: skip
    return normed, key
