# SPDX-License-Identifier: Apache-2.0
"""Times of our own MLA decode kernels on this machine's GPU, by replays of a CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tokenspeed_plugin.kernels.graph_timing import GRAPH_CALLS, time_us
from tokenspeed_plugin.kernels.mla.geometry import HEAD_DIMS, LATENT_DIMS


class NoHopperError(RuntimeError):
    """This machine has no GPU of compute capability 9.0."""


def measure_decode(shape: Mapping[str, int]) -> dict[str, float]:
    """Return microseconds by solution; KV rotates over parts of the cache that together exceed four times the L2.

    Raises:
        NoHopperError: there is nothing to measure on.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise NoHopperError("kernels bench needs a GPU of compute capability 9.0; this machine has none")
    from tokenspeed_plugin.kernels.mla.sm90.decode import MlaDecodePlan, MlaWorkspace, mla_decode
    from tokenspeed_plugin.kernels.mla.triton_decode import mla_decode_triton

    device = torch.device("cuda")
    heads, queries, page, requests = (shape[n] for n in ("heads", "query_tokens", "page_tokens", "requests"))
    pages = -(-shape["context_tokens"] // page)
    kv_bytes = requests * pages * page * HEAD_DIMS * 2
    parts = min(GRAPH_CALLS, max(2, 1 + 4 * torch.cuda.get_device_properties(device).L2_cache_size // kv_bytes))
    cache = torch.randn(parts * requests * pages, page, HEAD_DIMS, dtype=torch.bfloat16, device=device)
    tables = torch.randperm(parts * requests * pages, dtype=torch.int32, device=device).view(parts, requests, pages)
    seq_lens = torch.full((requests,), shape["context_tokens"], dtype=torch.int32, device=device)
    q = torch.randn(requests * queries, heads, HEAD_DIMS, dtype=torch.bfloat16, device=device)
    q_nope, q_rope = q.split((LATENT_DIMS, HEAD_DIMS - LATENT_DIMS), dim=-1)
    workspace = MlaWorkspace(heads, queries, requests, device)
    plans = [MlaDecodePlan(workspace, requests) for _ in range(parts)]
    for plan, table in zip(plans, tables, strict=True):
        plan.update(seq_lens, table, page)
    scale = HEAD_DIMS**-0.5

    def ours(call: int) -> None:
        mla_decode(q_nope, q_rope, cache, plans[call % parts], scale)

    def portable(call: int) -> None:
        mla_decode_triton(q_nope, q_rope, cache, tables[call % parts], seq_lens, scale, max_query_tokens=queries)

    return {"cuda_sm90": time_us(ours), "triton": time_us(portable)}
