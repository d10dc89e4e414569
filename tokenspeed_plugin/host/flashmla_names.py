# SPDX-License-Identifier: Apache-2.0
"""The vLLM objects that our MLA backend for e4m3 caches is built on; `host.check` comes first."""

from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend, FlashMLAImpl, FlashMLAMetadataBuilder

__all__ = ["FlashMLABackend", "FlashMLAImpl", "FlashMLAMetadataBuilder"]
