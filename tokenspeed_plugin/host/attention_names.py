# SPDX-License-Identifier: Apache-2.0
"""The vLLM objects that our MLA backend is built on. Import it only in a process that runs vLLM on Hopper; `host.check` comes first."""

from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
from vllm.v1.attention.backends.mla.flashattn_mla import (
    FlashAttnMLABackend,
    FlashAttnMLAImpl,
    FlashAttnMLAMetadataBuilder,
)

__all__ = [
    "FlashAttnMLABackend",
    "FlashAttnMLAImpl",
    "FlashAttnMLAMetadataBuilder",
    "flash_attn_varlen_func",
    "get_current_vllm_config",
]
