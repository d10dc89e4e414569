# SPDX-License-Identifier: Apache-2.0
"""The vLLM objects that our MLA layer is built on. Import it only in a process that runs vLLM; `host.check` comes first."""

from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.mla import MLAModules, MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import DeepseekScalingRotaryEmbedding
from vllm.v1.attention.backend import MLAAttentionImpl

__all__ = [
    "DeepseekScalingRotaryEmbedding",
    "MLAAttentionImpl",
    "MLAModules",
    "MultiHeadLatentAttentionWrapper",
    "RotaryEmbedding",
    "get_attention_context",
    "get_current_vllm_config",
]
