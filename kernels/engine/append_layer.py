# SPDX-License-Identifier: Apache-2.0
"""vLLM's MLA layer with one kernel in place of latent norm, rotation and cache write; all else is vLLM's.

A layer that the kernel cannot serve, and every layer of an engine that did not ask, is vLLM's own, with a line in the log.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from tokenspeed_plugin.host.append_names import (
    DeepseekScalingRotaryEmbedding,
    MLAAttentionImpl,
    MLAModules,
    MultiHeadLatentAttentionWrapper,
    RotaryEmbedding,
    get_current_vllm_config,
)
from tokenspeed_plugin.host.norms import rms_norm_numbers
from tokenspeed_plugin.kernels.engine.append_operation import KERNEL, mla_append
from tokenspeed_plugin.kernels.engine.append_start import layer_solution
from tokenspeed_plugin.kernels.engine.log_once import log_once
from tokenspeed_plugin.kernels.registry import KernelSpec

KNOWN_MODULES = frozenset(
    {
        "kv_a_layernorm",
        "kv_b_proj",
        "rotary_emb",
        "o_proj",
        "fused_qkv_a_proj",
        "kv_a_proj_with_mqa",
        "q_a_layernorm",
        "q_b_proj",
        "q_proj",
    }
)
"""Parts of a layer whose meaning is known here."""
PLAIN_CACHE_BACKENDS = ("CPU_MLA", "AMX_MLA")
"""Backends with a cache write of their own that leaves the same bytes as the one they inherit."""


def _has_appended(*_: Any, **__: Any) -> None:
    """In place of a backend's cache write: the tokens are there."""


class AppendingLatentAttention(MultiHeadLatentAttentionWrapper):
    """What vLLM makes in place of its own layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = inspect.signature(MultiHeadLatentAttentionWrapper.__init__).bind(self, *args, **kwargs).arguments
        self.appends = self._settle(given["mla_modules"])

    def _settle(self, modules: MLAModules) -> bool:
        """Hand the cache write to a kernel where one can have it."""
        attention, dtype = self.mla_attn, str(torch.get_default_dtype()).removeprefix("torch.")
        solution = layer_solution(
            get_current_vllm_config(), dtype, attention.kv_cache_dtype, self.kv_lora_rank, self.qk_rope_head_dim
        )
        if solution is None:
            return False
        reason = fallback_reason(self, modules) or (None if isinstance(solution, KernelSpec) else solution)
        if reason is not None or not isinstance(solution, KernelSpec):
            log_once(f"MLA append: layers with {reason} stay with vLLM's own kernels.")
            return False
        setattr(attention, KERNEL, solution.load())
        attention.impl.do_kv_cache_update = _has_appended
        log_once(f"MLA append: {solution.solution} norms, rotates and writes the new tokens.")
        return True

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, llama_4_scaling: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of new tokens `[tokens, hidden]` at `positions` `[tokens]`, behind the output projection."""
        if not self.appends:
            stock: torch.Tensor = super().forward(positions, hidden_states, llama_4_scaling)
            return stock
        queries, latent = self._projected(hidden_states)
        norm, rope = self.kv_a_layernorm, self.rotary_emb
        normed, key = mla_append(
            queries,
            latent,
            positions,
            norm.weight if norm.has_weight else None,
            norm.variance_epsilon,
            rope.cos_sin_cache,
            not rope.is_neox_style,
            self.mla_attn.layer_name,
        )
        if llama_4_scaling is not None:
            queries *= llama_4_scaling
        attended = self.mla_attn(
            queries, normed, key.unsqueeze(1), output_shape=(hidden_states.shape[0], self.num_heads * self.v_head_dim)
        )
        out: torch.Tensor = self.o_proj(attended)[0]
        return out

    def _projected(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [tokens, heads, dims], and latents before norm and rotation."""
        if self.q_lora_rank is None:
            latent = self.kv_a_proj_with_mqa(hidden_states)[0]
            queries = self.q_proj(hidden_states)[0]
        else:
            widths = [self.q_lora_rank, self.kv_lora_rank + self.qk_rope_head_dim]
            compressed, latent = self.fused_qkv_a_proj(hidden_states)[0].split(widths, dim=-1)
            queries = self.q_b_proj(self.q_a_layernorm(compressed))[0]
        return queries.view(-1, self.num_heads, self.qk_head_dim), latent


def fallback_reason(layer: Any, modules: MLAModules) -> str | None:
    """Why a layer of vLLM's stays as it is, None when the append may be fused in it."""
    attention, norm, rope = layer.mla_attn, layer.kv_a_layernorm, layer.rotary_emb
    others = sorted(name for name, part in vars(modules).items() if name not in KNOWN_MODULES and _is_there(part))
    numbers = rms_norm_numbers(norm)
    found = (
        (f"{', '.join(others)}, which only vLLM's layer knows,", bool(others)),
        ("context parallelism", layer.dcp_q_replicate or getattr(attention, "use_pcp", False)),
        ("HiSparse", getattr(attention, "hisparse_cache", None) is not None),
        (f"a norm {type(norm).__name__}", numbers is None or numbers[2] != 0.0),
        (f"the rotary embedding {type(rope).__name__}", not _is_plain_rope(rope, layer.qk_rope_head_dim)),
        (f"a cache write of {attention.attn_backend.get_name()}'s own", not _writes_plainly(attention)),
    )
    return next((reason for reason, applies in found if applies), None)


def _writes_plainly(attention: Any) -> bool:
    """Whether a backend's cache write only puts latent and key side by side into their slot."""
    inherited = type(attention.impl).do_kv_cache_update is MLAAttentionImpl.do_kv_cache_update
    return inherited or attention.attn_backend.get_name() in PLAIN_CACHE_BACKENDS


def _is_there(part: Any) -> bool:
    return part is not None and part is not False


def _is_plain_rope(rope: Any, rope_dims: int) -> bool:
    """Whether a rotary embedding turns whole heads by a table of cosines and sines, as vLLM's two plain classes do."""
    methods = ("forward", "forward_native", "forward_cuda")
    return any(
        all(getattr(type(rope), method, None) is getattr(kind, method) for method in methods)
        and rope.rotary_dim == rope.head_size == rope_dims
        for kind in (RotaryEmbedding, DeepseekScalingRotaryEmbedding)
    )
