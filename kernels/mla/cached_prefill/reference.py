# SPDX-License-Identifier: Apache-2.0
"""Torch reference of MLA prefill on a cached prefix: the definition that every solution is held against."""

from __future__ import annotations

import itertools

import torch

from tokenspeed_plugin.kernels.mla.cached_prefill.groups import NOPE_DIMS
from tokenspeed_plugin.kernels.mla.geometry import LATENT_DIMS
from tokenspeed_plugin.kernels.mla.prefill_reference import mla_prefill_reference
from tokenspeed_plugin.kernels.mla.reference import gather_latents


def mla_cached_prefill_reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    query_starts: torch.Tensor,
    weights: torch.Tensor,
    softmax_scale: float,
    *,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Causal attention of each request's new tokens over its cached tokens, the new ones among them.

    Args:
        q: [tokens, heads, 192], 128 dims without rope then 64 with it.
        kv_cache: [pages, page_tokens, 576]; holds the new tokens, too.
        block_table: [requests, pages per request] int32.
        kv_lens: [requests] int32, new tokens included.
        query_starts: [requests + 1] int32.
        weights: [heads, 256, 512]: of each head 128 rows that make keys of latents, then 128 that make values.
        softmax_scale: factor of the scores.
        dtype: arithmetic; torch.float64 is the truth, torch.bfloat16 the same-type run that bounds the allowed error.

    Returns:
        [tokens, heads, 128] in `dtype`. Rows that may read nothing are zero.
    """
    out = torch.zeros(*q.shape[:2], weights.shape[1] - NOPE_DIMS, dtype=dtype, device=q.device)
    lengths = kv_lens.tolist()
    for request, (first, last) in enumerate(itertools.pairwise(query_starts.tolist())):
        if first == last:
            continue
        tokens = gather_latents(kv_cache, block_table[request], lengths[request]).to(dtype)
        unfolded = torch.einsum("tl,hdl->thd", tokens[:, :LATENT_DIMS], weights.to(dtype))
        rope = tokens[:, None, LATENT_DIMS:].expand(-1, q.shape[1], -1)
        keys = torch.cat((unfolded[..., :NOPE_DIMS], rope), dim=-1)
        rows, values = q[first:last], unfolded[..., NOPE_DIMS:]
        own, theirs = (torch.tensor([0, n], dtype=torch.int32) for n in (len(rows), len(tokens)))
        out[first:last], _ = mla_prefill_reference(rows, keys, values, own, theirs, softmax_scale, dtype=dtype)
    return out
