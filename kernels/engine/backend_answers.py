# SPDX-License-Identifier: Apache-2.0
"""What all our attention backends answer to vLLM's questions, in front of any of vLLM's MLA backends among the bases."""

from __future__ import annotations

from typing import Any

from tokenspeed_plugin.kernels.mla.share import PAGE_TOKENS


class BackendAnswers:
    """vLLM asks before it builds layers."""

    @staticmethod
    def get_name() -> str:
        """The slot; vLLM looks backends up by it."""
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:  # noqa: ARG004 - vLLM's signature
        """Tokens of a kernel page: what our kernels and FlashAttention 3 are fastest with, and the only number that FlashMLA takes."""
        return [PAGE_TOKENS]

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """How a request is split depends on the batch around it."""
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """The choice of a kernel reads the query lengths on the CPU."""
        return False
