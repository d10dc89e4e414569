# SPDX-License-Identifier: Apache-2.0
"""MLA decode on Hopper from an e4m3 cache with e4m3 queries, one scale for each, as vLLM hands them over."""

from __future__ import annotations

import torch

from tokenspeed_plugin.kernels.mla.geometry import FP8_ROWS, HEAD_DIMS
from tokenspeed_plugin.kernels.mla.operands import require
from tokenspeed_plugin.kernels.mla.sm90.decode import (
    MlaDecodePlan,
    MlaWorkspace,
    check_results,
    decode_params,
    require_cache,
)
from tokenspeed_plugin.kernels.mla.sm90.library import load_fp8

E4M3 = torch.float8_e4m3fn


def fp8_workspace(num_heads: int, max_query_tokens: int, max_requests: int, device: torch.device | str) -> MlaWorkspace:
    """The workspace for this version's row tiles; plans are the same for both element types."""
    return MlaWorkspace(num_heads, max_query_tokens, max_requests, device, FP8_ROWS)


def mla_decode_fp8(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    plan: MlaDecodePlan,
    softmax_scale: float,
    query_scale: torch.Tensor,
    kv_scale: torch.Tensor,
    *,
    query_starts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    dependent_launch: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of each request's last query tokens over its cached latents.

    Args:
        q: [tokens, heads, 576] e4m3, 512 latent then 64 rope dims; token and head strides are multiples of 16.
        kv_cache: [pages, page_tokens, 576] e4m3, likewise.
        plan: updated for this step; its workspace comes from `fp8_workspace`.
        softmax_scale: factor of the scores.
        query_scale: one fp32 number; a query is its e4m3 values times this.
        kv_scale: one fp32 number; a latent is its e4m3 values times this.
        query_starts: [requests + 1] int32; None: every request has `workspace.max_query_tokens` tokens.
        out: [tokens, heads, 512] bf16 to write to.
        lse: [tokens, heads] fp32 to write to.
        dependent_launch: start before the previous kernel has drained; the kernel waits for it by itself.

    Returns:
        out and lse (natural logarithm), as `mla_decode`.

    Raises:
        ValueError: a shape, type or layout is not what the kernel takes; nothing was launched.
    """
    _, _, page_tokens = plan.inputs()
    workspace, device = plan.workspace, plan.workspace.device
    if workspace.tiles.rows not in FP8_ROWS:
        raise ValueError(f"plan: row tiles of {workspace.tiles.rows} rows, allowed: {FP8_ROWS}; use fp8_workspace()")
    require(q, "q", (q.shape[0], workspace.num_heads, HEAD_DIMS), E4M3, device)
    if q.data_ptr() % 16 or q.stride(0) % 16 or q.stride(1) % 16:
        raise ValueError("q: its address and strides must be multiples of 16 bytes")
    require_cache(kv_cache, page_tokens, device, E4M3)
    for name, scale in (("query_scale", query_scale), ("kv_scale", kv_scale)):
        require(scale, name, (1,), torch.float32, device)
    out, lse = check_results(plan, q, query_starts, out, lse)
    params = decode_params(plan, q, kv_cache, out, lse, query_starts, softmax_scale, dependent_launch)
    params.query_scale, params.kv_scale = query_scale.data_ptr(), kv_scale.data_ptr()
    load_fp8().decode(params, torch.cuda.current_stream(device).cuda_stream)
    return out, lse
