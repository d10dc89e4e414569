# SPDX-License-Identifier: Apache-2.0
"""The attention backend for vLLM's `CUSTOM` slot over an e4m3 cache: MLA decode by a kernel of the registry, all else by vLLM's
FlashMLA, which vLLM itself takes for such a cache on Hopper.

vLLM hands either of them e4m3 queries, divided by the layer's scale of queries, and the cache as e4m3 values, which times the
layer's scale of keys are latents. FlashMLA takes decodes of equally many query tokens only, so vLLM sorts others among the
prefills; our kernel gets the same batches.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tokenspeed_plugin.host.flashmla_names import FlashMLABackend, FlashMLAImpl, FlashMLAMetadataBuilder
from tokenspeed_plugin.kernels.engine.backend_answers import BackendAnswers
from tokenspeed_plugin.kernels.engine.caches import E4M3_CACHE, LatentCache
from tokenspeed_plugin.kernels.engine.decode_steps import DecodeStep
from tokenspeed_plugin.kernels.engine.log_once import log_once
from tokenspeed_plugin.kernels.engine.planned_decode import PlannedDecodeBuilder, PlannedDecodeImpl
from tokenspeed_plugin.kernels.mla.cached_prefill.solutions import OURS as OUR_PREFILL


class Fp8MlaBackend(BackendAnswers, FlashMLABackend):
    """What vLLM asks before it builds layers."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["fp8", "fp8_e4m3"]

    @staticmethod
    def get_builder_cls() -> type[Fp8MlaMetadataBuilder]:
        """Builder of a step's metadata."""
        return Fp8MlaMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[Fp8MlaImpl]:
        """What runs in each layer."""
        return Fp8MlaImpl


class Fp8MlaMetadataBuilder(PlannedDecodeBuilder, FlashMLAMetadataBuilder):
    """Builds the metadata of a step, on the model's stream, before its layers."""

    latent_cache: ClassVar[LatentCache] = E4M3_CACHE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        log_once(
            f"MLA prefill on a cached prefix stays with vLLM: {OUR_PREFILL} reads bfloat16 caches, this one is e4m3."
        )


class Fp8MlaImpl(PlannedDecodeImpl, FlashMLAImpl):
    """Attention of one layer; what our kernel does not take is vLLM's."""

    def run_step(
        self,
        step: DecodeStep,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PlannedDecodeImpl`."""
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        return step.run_scaled(queries, kv_cache, self.scale, layer._q_scale, layer._k_scale)
