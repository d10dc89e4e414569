# SPDX-License-Identifier: Apache-2.0
"""The vLLM objects that every MLA backend of ours is built on; `host.check` comes first."""

from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadataBuilder,
)

__all__ = ["MLACommonDecodeMetadata", "MLACommonImpl", "MLACommonMetadataBuilder"]
