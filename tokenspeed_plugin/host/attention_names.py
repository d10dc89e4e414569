# SPDX-License-Identifier: Apache-2.0
"""The vLLM objects that our MLA backend is built on. Import it only in a process that runs vLLM on Hopper; `host.check` comes first."""

from vllm.v1.attention.backends.mla.flashattn_mla import (
    FlashAttnMLABackend,
    FlashAttnMLADecodeMetadata,
    FlashAttnMLAImpl,
    FlashAttnMLAMetadataBuilder,
)

__all__ = [
    "FlashAttnMLABackend",
    "FlashAttnMLADecodeMetadata",
    "FlashAttnMLAImpl",
    "FlashAttnMLAMetadataBuilder",
]
