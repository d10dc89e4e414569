# SPDX-License-Identifier: Apache-2.0
"""The attention backend for vLLM's `CUSTOM` slot over a bf16 cache: MLA decode by a kernel of the registry, all else by vLLM's
FlashAttention MLA.

Both read the same cache in the same pages, so each batch may go either way. Which way is settled when the step's metadata is
built (`planned_decode`); every layer only looks whether there is a plan.
"""

from __future__ import annotations

from typing import Any

import torch

from tokenspeed_plugin.host.attention_names import (
    FlashAttnMLABackend,
    FlashAttnMLAImpl,
    FlashAttnMLAMetadataBuilder,
    get_current_vllm_config,
)
from tokenspeed_plugin.kernels.engine.backend_answers import BackendAnswers
from tokenspeed_plugin.kernels.engine.decode_steps import DecodeStep
from tokenspeed_plugin.kernels.engine.planned_decode import PlannedDecodeBuilder, PlannedDecodeImpl
from tokenspeed_plugin.kernels.engine.prefill_steps import (
    PrefillSteps,
    dense_weights,
    prefill_steps,
    reserved_bytes,
)


class MlaBackend(BackendAnswers, FlashAttnMLABackend):
    """What vLLM asks before it builds layers."""

    @staticmethod
    def get_builder_cls() -> type[MlaMetadataBuilder]:
        """Builder of a step's metadata."""
        return MlaMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[MlaImpl]:
        """What runs in each layer."""
        return MlaImpl


class MlaMetadataBuilder(PlannedDecodeBuilder, FlashAttnMLAMetadataBuilder):
    """Builds the metadata of a step, on the model's stream, before its layers."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self._prefills = _prefill_steps(kv_cache_spec, layer_names, vllm_config)
        if self._prefills is not None:
            self.reorder_batch_threshold = self._prefills.absorbed_limit
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Metadata of a step; with the plan of our prefill when it takes the step's prefills."""
        prefills, least = self._prefills, self.reorder_batch_threshold
        if prefills is None or common_attn_metadata.max_query_len <= least:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        lengths = common_attn_metadata.seq_lens_cpu_upper_bound
        self.reorder_batch_threshold = max(least, prefills.threshold(common_attn_metadata.query_start_loc_cpu, lengths))
        try:
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        finally:
            self.reorder_batch_threshold = least
        prefill = metadata.prefill
        if prefill is not None and prefill.chunked_context is not None:
            contexts = prefill.chunked_context.context_lens_list
            prefill.step = prefills.step(prefill.query_lens_cpu.tolist(), contexts, prefill.block_table)
        return metadata


def _prefill_steps(kv_cache_spec: Any, layer_names: list[str], vllm_config: Any) -> PrefillSteps | None:
    layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
    projections = [layer.kv_b_proj for layer in layers]
    return prefill_steps(vllm_config, layers[0].num_heads, layers[0], kv_cache_spec, projections)


class MlaImpl(PlannedDecodeImpl, FlashAttnMLAImpl):
    """Attention of one layer; what our kernels do not take is vLLM's."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._vllm_config = get_current_vllm_config()

    def reserve_workspace(self) -> None:
        """Show vLLM, while it measures its memory, what a prefill will need."""
        if size := reserved_bytes(self._vllm_config, self.num_heads, self):
            torch.empty(size, dtype=torch.uint8, device=self.kv_b_proj.weight.device)

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Attention of new tokens over a cached prefix and each other, into `output`, [tokens, heads x 128]."""
        step = getattr(attn_metadata.prefill, "step", None)
        weights = dense_weights(self.kv_b_proj, self.num_heads) if step is not None and output_scale is None else None
        if step is None or weights is None:
            super().forward_mha(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale)
            return
        out = output.view(-1, self.num_heads, self.v_head_dim)
        step.run(q, kv_c_and_k_pe_cache, weights, self.scale, out)

    def run_step(
        self,
        step: DecodeStep,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        layer: Any,  # noqa: ARG002 - a bf16 cache has no scales
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PlannedDecodeImpl`."""
        q_nope, q_rope = q if isinstance(q, tuple) else q.split((self.kv_lora_rank, self.qk_rope_head_dim), dim=-1)
        return step.run(q_nope, q_rope, kv_cache, self.scale)
