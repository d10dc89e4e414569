# SPDX-License-Identifier: Apache-2.0
"""Torch reference of MLA decode: the definition that every solution is held against."""

from __future__ import annotations

import torch

from tokenspeed_plugin.kernels.mla.geometry import LATENT_DIMS


def gather_latents(kv_cache: torch.Tensor, block_table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens of a request, [length, 576], from [pages, page_tokens, 576] and its row of the table."""
    page_tokens = kv_cache.shape[1]
    pages = block_table[: -(-length // page_tokens)].long()
    return kv_cache[pages].reshape(-1, kv_cache.shape[2])[:length]


def mla_decode_reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    *,
    query_starts: torch.Tensor | None = None,
    query_scale: torch.Tensor | None = None,
    kv_scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of each request's last query tokens over its cached latents.

    Args:
        q: [tokens, heads, 576], 512 latent dims then 64 rope dims.
        kv_cache: [pages, page_tokens, 576].
        block_table: [requests, pages per request] int32.
        seq_lens: [requests] int32, this step's tokens included.
        softmax_scale: factor of the scores.
        query_starts: [requests + 1] int32; None: all requests have the same number of tokens.
        query_scale: one number; the queries are the values of `q` times this. None: 1.
        kv_scale: one number; the latents are the values of `kv_cache` times this. None: 1.
        dtype: arithmetic; torch.float64 is the truth, torch.bfloat16 the same-type run that bounds the allowed error
            (products round to bf16, sums run in fp32, as on a tensor core).

    Returns:
        out [tokens, heads, 512] and lse [tokens, heads] (natural logarithm), in `dtype` (lse in at least fp32). Rows that
        may read nothing are zero with lse -inf.
    """
    requests = seq_lens.shape[0]
    starts = (
        query_starts.tolist()
        if query_starts is not None
        else [request * (q.shape[0] // max(requests, 1)) for request in range(requests + 1)]
    )
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.zeros(*q.shape[:2], LATENT_DIMS, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=wide, device=q.device)
    for request, length in enumerate(seq_lens.tolist()):
        first, last = starts[request], starts[request + 1]
        if length <= 0 or last <= first:
            continue
        keys = _scaled(gather_latents(kv_cache, block_table[request], length), kv_scale, dtype)
        queries = _scaled(q[first:last], query_scale, dtype)
        scores = torch.einsum("qhd,kd->qhk", queries, keys).to(wide) * softmax_scale
        visible = length - (last - first - 1) + torch.arange(last - first, device=q.device)
        hidden = torch.arange(length, device=q.device)[None, :] >= visible[:, None]
        scores.masked_fill_(hidden[:, None, :], -torch.inf)
        row_lse = torch.logsumexp(scores, dim=-1)
        probs = torch.exp(scores - row_lse.masked_fill(row_lse == -torch.inf, 0.0)[..., None])
        out[first:last] = torch.einsum("qhk,kd->qhd", probs.to(dtype), keys[:, :LATENT_DIMS])
        lse[first:last] = row_lse
    return out, lse


def _scaled(values: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    # the product in float64: it rounds once, to `dtype`
    return values.to(dtype) if scale is None else (values.double() * scale.double()).to(dtype)
