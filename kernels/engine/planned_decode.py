# SPDX-License-Identifier: Apache-2.0
"""The parts of a backend that plan decodes for a kernel of the registry and run what was planned, in front of any of vLLM's MLA backends.

Put them before vLLM's classes among the bases: what the kernel does not take goes on to those.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tokenspeed_plugin.host.mla_names import MLACommonDecodeMetadata, MLACommonImpl, MLACommonMetadataBuilder
from tokenspeed_plugin.kernels.engine.caches import BF16_CACHE, LatentCache
from tokenspeed_plugin.kernels.engine.decode_steps import DecodeStep
from tokenspeed_plugin.kernels.engine.start import decode_steps


@dataclass
class PlannedDecodeMetadata(MLACommonDecodeMetadata):
    """What vLLM knows of any decode batch, and the step of our kernel, which has taken this one."""

    step: DecodeStep | None = None


class PlannedDecodeBuilder(MLACommonMetadataBuilder):
    """Settles for each decode batch who runs it, and plans it for our kernel when that takes it."""

    latent_cache: ClassVar[LatentCache] = BF16_CACHE
    """What the backend's layers read."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._steps = decode_steps(vllm_config, self.num_heads, self.mla_dims, kv_cache_spec, device, self.latent_cache)
        self._for_capture = False

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Metadata that a graph will be captured with; its plan stays for the replays."""
        self._for_capture = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._for_capture = False

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> Any:
        longest = max(1, int((query_start_loc_cpu[1:] - query_start_loc_cpu[:-1]).max()))
        step = None
        if self._steps is not None and dcp_tot_seq_lens_device is None:
            step = self._steps.step(
                longest,
                num_decode_tokens,
                seq_lens_device,
                block_table_tensor,
                query_start_loc_device,
                for_capture=self._for_capture,
            )
        if step is None:
            return super()._build_decode(
                block_table_tensor=block_table_tensor,
                seq_lens_device=seq_lens_device,
                max_seq_len=max_seq_len,
                query_start_loc_cpu=query_start_loc_cpu,
                query_start_loc_device=query_start_loc_device,
                num_decode_tokens=num_decode_tokens,
                max_query_len=max_query_len,
                dcp_tot_seq_lens_device=dcp_tot_seq_lens_device,
            )
        return PlannedDecodeMetadata(
            block_table=block_table_tensor, seq_lens=seq_lens_device, dcp_tot_seq_lens=None, step=step
        )


class PlannedDecodeImpl(MLACommonImpl):
    """Decode of one layer by the step's plan; without one it is vLLM's."""

    supports_dcp: bool = False
    supports_pcp: bool = False

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention over cached latents: [tokens, heads, 512], and the logarithm of the softmax's sum where vLLM wants it."""
        step = getattr(attn_metadata.decode, "step", None)
        if step is None:
            out: tuple[torch.Tensor, torch.Tensor | None]
            out = super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
            return out
        latents, lse = self.run_step(step, q, kv_c_and_k_pe_cache, layer)
        return latents, (lse if self.need_to_return_lse_for_decode else None)

    @abstractmethod
    def run_step(
        self,
        step: DecodeStep,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The planned step with the operands that the backend's cache asks for: latents and log-sum-exp."""
