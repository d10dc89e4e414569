# SPDX-License-Identifier: Apache-2.0
"""Ragged MLA prefill on Blackwell, bf16. Compiled, never run on hardware."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from tokenspeed_plugin.kernels.mla.operands import require
from tokenspeed_plugin.kernels.mla.sm100.decode import architecture, launch, require_aligned
from tokenspeed_plugin.kernels.mla.sm100.prefill.layout import KEY_DIMS, QUERY_TILE, VALUE_DIMS


def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_starts: torch.Tensor,
    kv_starts: torch.Tensor,
    max_query_tokens: int,
    softmax_scale: float,
    *,
    causal: bool = True,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's query tokens over its own KV tokens; see `mla_prefill_reference`.

    Args:
        q: [tokens, heads, 192] bf16; strides of token and head are multiples of 16 bytes, here and below.
        k: [kv tokens, heads, 192] bf16.
        v: [kv tokens, heads, 128] bf16.
        query_starts: [requests + 1] int32.
        kv_starts: [requests + 1] int32.
        max_query_tokens: query tokens of a request, at most.
        softmax_scale: factor of the scores, above 0.
        causal: the last query token sees all KV tokens of its request, the one before it one less, and so on.
        out: [tokens, heads, 128] bf16 to write to.
        lse: [tokens, heads] fp32 to write to.

    Returns:
        out and lse (natural logarithm). Rows that may read nothing are zero with lse -inf.

    Raises:
        ValueError: a shape, type or layout is not what the kernel takes; nothing was launched.
    """
    device, (tokens, heads, _), kv_tokens = q.device, q.shape, k.shape[0]
    requests = query_starts.shape[0] - 1
    require(q, "q", (tokens, heads, KEY_DIMS), torch.bfloat16, device)
    require(k, "k", (kv_tokens, heads, KEY_DIMS), torch.bfloat16, device)
    require(v, "v", (kv_tokens, heads, VALUE_DIMS), torch.bfloat16, device)
    require(query_starts, "query_starts", (requests + 1,), torch.int32, device)
    require(kv_starts, "kv_starts", (requests + 1,), torch.int32, device)
    if max_query_tokens < 1 or requests < 1:
        raise ValueError(f"max_query_tokens={max_query_tokens}, {requests} requests: both must be at least 1")
    if not softmax_scale > 0.0:
        raise ValueError(f"softmax_scale={softmax_scale}, allowed: above 0")
    if out is None:
        out = torch.empty(tokens, heads, VALUE_DIMS, dtype=torch.bfloat16, device=device)
    if lse is None:
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=device)
    require(out, "out", (tokens, heads, VALUE_DIMS), torch.bfloat16, device)
    require(lse, "lse", (tokens, heads), torch.float32, device)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        require_aligned(tensor, name)
    if not lse.is_contiguous():
        raise ValueError(f"lse: strides {lse.stride()}, allowed: contiguous")
    values = {
        "q": q.data_ptr(),
        "k": k.data_ptr(),
        "v": v.data_ptr(),
        "out": out.data_ptr(),
        "lse": lse.data_ptr(),
        "query_starts": query_starts.data_ptr(),
        "kv_starts": kv_starts.data_ptr(),
        **{f"{name}_strides": part.stride()[:2] for name, part in (("q", q), ("k", k), ("v", v), ("out", out))},
        "num_tokens": tokens,
        "num_kv_tokens": kv_tokens,
        "num_heads": heads,
        "num_requests": requests,
        "num_query_tiles": -(-max_query_tokens // QUERY_TILE),
        "scale_log2": softmax_scale * math.log2(math.e),
    }
    launch(_prefill_kernel(causal, architecture(device)), "PREFILL", None, values, device)
    return out, lse


@functools.cache
def _prefill_kernel(causal: bool, arch: str) -> Any:
    from tokenspeed_plugin.kernels.mla.sm100.compiling import compile_prefill
    from tokenspeed_plugin.kernels.mla.sm100.prefill.block import PrefillVariant

    return compile_prefill(PrefillVariant(causal), arch=arch)
