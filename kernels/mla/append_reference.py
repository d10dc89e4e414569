# SPDX-License-Identifier: Apache-2.0
"""Torch reference of the append to the paged latent cache: RMS norm, rotation and write, the definition that every solution is held against."""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn


def mla_append_reference(
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
    """Rotate the queries in place, norm and rotate the new tokens' latents, and write those into their cache slots.

    Arithmetic is in fp32, in float64 when `q` is (the truth: nothing is rounded then). Results are rounded once, to the type of
    `latent`; an e4m3 cache gets the rounded values over `kv_scale`, clamped to its range.

    Args:
        q: [tokens, heads, dims]; the last `rope` dims of each head are rotated in place.
        latent: [tokens, latent + rope], as the projection leaves it.
        positions: [tokens] integers, rows of `rope_table`.
        norm_weight: [latent]; None: ones.
        epsilon: added to the mean square.
        rope_table: [positions, rope]: cosines of all pairs, then sines; factors of YaRN are in it.
        kv_cache: [pages, page_tokens, latent + rope], of the type of `latent` or float8_e4m3fn; None writes nothing.
        slots: [at most tokens] int64, page * page_tokens + place; a negative one, and a token past the last slot, are padding
            and written nowhere.
        interleaved: whether dims 2i and 2i + 1 are a pair (GPT-J, DeepSeek), or i and i + rope / 2 (NeoX).
        kv_scale: [1] fp32, for an e4m3 cache.

    Returns:
        The normed latents [tokens, latent] and rotated keys [tokens, rope], of padding, too.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    rope_dims = rope_table.shape[1]
    cos, sin = rope_table[positions].to(wide).split(rope_dims // 2, dim=-1)
    q[..., -rope_dims:] = _rotated(q[..., -rope_dims:].to(wide), cos[:, None], sin[:, None], interleaved).to(q.dtype)
    values, key = latent.to(wide).split((latent.shape[1] - rope_dims, rope_dims), dim=-1)
    values = values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + epsilon)
    if norm_weight is not None:
        values = values * norm_weight.to(wide)
    normed, rotated = values.to(latent.dtype), _rotated(key, cos, sin, interleaved).to(latent.dtype)
    if kv_cache is not None and slots is not None:
        _write(torch.cat((normed, rotated), dim=-1)[: slots.shape[0]], kv_cache, slots, kv_scale)
    return normed, rotated


def _rotated(values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    half = values.shape[-1] // 2
    paired = values.unflatten(-1, (half, 2)) if interleaved else values.unflatten(-1, (2, half)).transpose(-1, -2)
    first, second = paired.unbind(-1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)


def _write(tokens: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor, kv_scale: torch.Tensor | None) -> None:
    real = slots >= 0
    page, place = slots[real] // kv_cache.shape[1], slots[real] % kv_cache.shape[1]
    if kv_cache.dtype != E4M3:
        kv_cache[page, place] = tokens[real].to(kv_cache.dtype)
        return
    if kv_scale is None:
        raise ValueError("kv_scale is None, allowed for an e4m3 cache: [1] fp32")
    limit = torch.finfo(E4M3).max
    quantised = (tokens[real].float() / kv_scale.float()).clamp(-limit, limit).to(E4M3)
    kv_cache.view(torch.uint8)[page, place] = quantised.view(torch.uint8)
