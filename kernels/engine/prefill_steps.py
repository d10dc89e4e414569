# SPDX-License-Identifier: Apache-2.0
"""Prefills on a cached prefix in an engine: which of a step's batches our kernel takes, and its plan, shared by all layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_plugin.host.attention_names import flash_attn_varlen_func
from tokenspeed_plugin.kernels.engine.log_once import log_once
from tokenspeed_plugin.kernels.engine.start import tuning_of_this_gpu
from tokenspeed_plugin.kernels.mla.cached_prefill.groups import NOPE_DIMS, VALUE_DIMS, workspace_bytes
from tokenspeed_plugin.kernels.mla.cached_prefill.prefill import (
    CachedPrefillPlan,
    mla_cached_prefill,
    plan_cached_prefill,
)
from tokenspeed_plugin.kernels.mla.cached_prefill.solutions import HOST_BACKEND, MODE, OURS, UNFOLDED
from tokenspeed_plugin.kernels.mla.geometry import LATENT_DIMS, ROPE_DIMS
from tokenspeed_plugin.kernels.mla.prefill_share import PrefillShare
from tokenspeed_plugin.kernels.mla.share import PAGE_TOKENS
from tokenspeed_plugin.kernels.registry import default_registry

WORKSPACE_BYTES = 2 << 30
"""For latents, keys and values of a step, while its attention runs: 16 heads of a request of 159,783 tokens."""
LEAST_HEADS = 2
"""Heads of the longest request that the workspace holds in any case."""


@dataclass(frozen=True)
class PrefillStep:
    """What all layers of a step share."""

    plan: CachedPrefillPlan
    workspace_bytes: int

    def run(
        self, q: torch.Tensor, kv_cache: torch.Tensor, weights: torch.Tensor, softmax_scale: float, out: torch.Tensor
    ) -> None:
        """Attention of one layer; see `mla_cached_prefill`."""
        # From the allocator's cache: always the same size, so that it is the same memory for all layers and steps.
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=q.device)
        mla_cached_prefill(q, kv_cache, weights, self.plan, softmax_scale, workspace, attend, out)


class PrefillSteps:
    """Plans the prefills that our kernel takes.

    Args:
        share: the batches that it takes.
        num_heads: query heads on this GPU.
        page_tokens: tokens of a kernel page.
        workspace_bytes: for latents, keys and values.
    """

    def __init__(self, share: PrefillShare, num_heads: int, page_tokens: int, workspace_bytes: int) -> None:
        self.share = share
        self._num_heads, self._page_tokens, self._workspace_bytes = num_heads, page_tokens, workspace_bytes

    @property
    def absorbed_limit(self) -> int:
        """New tokens of a request up to which its queries may go to the latent space."""
        return self.share.absorbed_limit

    def threshold(self, query_starts: torch.Tensor, kv_lens: torch.Tensor) -> int:
        """The same number for one batch; larger where no request of it is better off with our kernel.

        Args:
            query_starts: [requests + 1] int32 on the CPU.
            kv_lens: [requests] int32 on the CPU, exact for requests with more than one query token or a draft.
        """
        queries = query_starts[1:] - query_starts[:-1]
        return self.share.threshold(zip(queries.tolist(), (kv_lens[: len(queries)] - queries).tolist(), strict=True))

    def step(self, query_lens: Sequence[int], context_lens: Sequence[int], table: torch.Tensor) -> PrefillStep | None:
        """Plan the prefills of a step; None leaves them to the host's backend.

        The request with most work, new tokens times tokens before them, decides.

        Args:
            query_lens: new tokens by request.
            context_lens: cached tokens before them.
            table: [requests, pages] int32 on the device.
        """
        pairs = list(zip(query_lens, context_lens, strict=True))
        queries, context = max(pairs, key=lambda pair: pair[0] * pair[1])
        if not self.share.verdict(queries, context, UNFOLDED).taken:
            return None
        kv_lens = [query + cached for query, cached in pairs]
        plan = plan_cached_prefill(
            query_lens, kv_lens, table, self._page_tokens, self._num_heads, self._workspace_bytes
        )
        return PrefillStep(plan, self._workspace_bytes)


def prefill_steps(
    vllm_config: Any, num_heads: int, mla_dims: Any, kv_cache_spec: Any, projections: Iterable[Any]
) -> PrefillSteps | None:
    """The prefills for a metadata builder; None when all of them stay with vLLM's backend.

    Args:
        vllm_config: vLLM's configuration.
        num_heads: query heads of the builder's layers on this GPU.
        mla_dims: vLLM's sizes of those layers.
        kv_cache_spec: of those layers, in kernel pages.
        projections: what makes keys and values of latents in each of those layers.
    """
    share = prefill_share(vllm_config, num_heads, mla_dims)
    if share is None or (kv_cache_spec.block_size, kv_cache_spec.dtype) != (PAGE_TOKENS, torch.bfloat16):
        return None
    if any(dense_weights(projection, num_heads) is None for projection in projections):
        log_once(f"MLA prefill on a cached prefix stays with {HOST_BACKEND}: kv_b_proj is no dense bfloat16 matrix.")
        return None
    log_once(
        f"MLA prefill on a cached prefix, {num_heads} heads: {OURS} above {share.absorbed_limit} new tokens, "
        f"where it is the faster; others go to {HOST_BACKEND}."
    )
    room = reserved_bytes(vllm_config, num_heads, mla_dims)
    return PrefillSteps(share, num_heads, kv_cache_spec.block_size, room)


def prefill_share(vllm_config: Any, num_heads: int, mla_dims: Any) -> PrefillShare | None:
    """The prefills that our kernel would take from vLLM's backend; None when there are none."""
    dims = (mla_dims.kv_lora_rank, mla_dims.qk_rope_head_dim, mla_dims.qk_nope_head_dim, mla_dims.v_head_dim)
    spec = next((s for s in default_registry().candidates("mla", MODE) if s.solution == OURS), None)
    if dims != (LATENT_DIMS, ROPE_DIMS, NOPE_DIMS, VALUE_DIMS) or spec is None or spec.unavailable() is not None:
        return None
    share = PrefillShare(num_heads, vllm_config.model_config.max_model_len, tuning_of_this_gpu())
    return share if share.takes_anything() else None


def reserved_bytes(vllm_config: Any, num_heads: int, mla_dims: Any) -> int:
    """Bytes that a step's prefills need at once, beside their results; 0 when vLLM's backend has them all."""
    if prefill_share(vllm_config, num_heads, mla_dims) is None:
        return 0
    longest = vllm_config.model_config.max_model_len
    most = workspace_bytes(longest * vllm_config.scheduler_config.max_num_seqs, num_heads)
    return max(min(WORKSPACE_BYTES, most), workspace_bytes(longest, min(LEAST_HEADS, num_heads)))


def dense_weights(projection: Any, num_heads: int) -> torch.Tensor | None:
    """vLLM's kv_b_proj as [heads, 256, 512], without a copy; None when it is quantized or something else."""
    weight = getattr(projection, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dtype != torch.bfloat16 or not weight.is_contiguous():
        return None
    shape = (num_heads, NOPE_DIMS + VALUE_DIMS, LATENT_DIMS)
    return weight.detach().view(shape) if tuple(weight.shape) == (shape[0] * shape[1], shape[2]) else None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_starts: torch.Tensor,
    kv_starts: torch.Tensor,
    longest_query: int,
    longest_kv: int,
    softmax_scale: float,
    out: torch.Tensor,
) -> None:
    """vLLM's FlashAttention 3 as `mla_cached_prefill` calls it."""
    flash_attn_varlen_func(
        q=q,
        k=k,
        v=v,
        max_seqlen_q=longest_query,
        cu_seqlens_q=query_starts,
        max_seqlen_k=longest_kv,
        cu_seqlens_k=kv_starts,
        softmax_scale=softmax_scale,
        causal=True,
        out=out,
        fa_version=3,
    )
