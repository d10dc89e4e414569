# SPDX-License-Identifier: Apache-2.0
"""Torch reference of ragged MLA prefill: the definition that every solution is held against."""

from __future__ import annotations

import torch


def mla_prefill_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_starts: torch.Tensor,
    kv_starts: torch.Tensor,
    softmax_scale: float,
    *,
    causal: bool = True,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's query tokens over its own KV tokens.

    Args:
        q: [tokens, heads, 192].
        k: [kv tokens, heads, 192].
        v: [kv tokens, heads, 128].
        query_starts: [requests + 1] int32.
        kv_starts: [requests + 1] int32.
        softmax_scale: factor of the scores.
        causal: the last query token sees all KV tokens of its request, the one before it one less, and so on.
        dtype: arithmetic; torch.float64 is the truth.

    Returns:
        out [tokens, heads, 128] and lse [tokens, heads] (natural logarithm), in `dtype`. Rows that may read nothing are
        zero with lse -inf.
    """
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device)
    starts, ends = query_starts.tolist(), kv_starts.tolist()
    for request in range(len(starts) - 1):
        rows, tokens = slice(*starts[request : request + 2]), slice(*ends[request : request + 2])
        queries, keys = q[rows].to(dtype), k[tokens].to(dtype)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * softmax_scale
        if causal:
            seen = len(keys) - len(queries) + 1 + torch.arange(len(queries), device=q.device)
            hidden = torch.arange(len(keys), device=q.device)[None, :] >= seen[:, None]
            scores.masked_fill_(hidden, -torch.inf)
        row_lse = torch.logsumexp(scores, dim=-1)
        probs = torch.exp(scores - row_lse.masked_fill(row_lse == -torch.inf, 0.0)[..., None])
        out[rows] = torch.einsum("hqk,khd->qhd", probs, v[tokens].to(dtype))
        lse[rows] = row_lse.T
    return out, lse
