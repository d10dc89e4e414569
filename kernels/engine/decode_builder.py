# SPDX-License-Identifier: Apache-2.0
"""The part of a metadata builder that plans decodes for a kernel of the registry, in front of any of vLLM's MLA builders.

Put it before vLLM's builder among the bases: what the kernel does not take goes on to that builder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tokenspeed_plugin.host.mla_names import MLACommonDecodeMetadata, MLACommonMetadataBuilder
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
