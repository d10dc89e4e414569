# SPDX-License-Identifier: Apache-2.0
"""The vLLM objects that placed models are built from. Import it only in a process that runs vLLM; `host.check` comes first."""

from vllm.compilation.backends import set_model_tag
from vllm.compilation.decorators import support_torch_compile
from vllm.distributed.parallel_state import GroupCoordinator, get_tp_group
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.utils import make_empty_intermediate_tensors_factory
from vllm.sequence import IntermediateTensors

__all__ = [
    "GemmaRMSNorm",
    "GroupCoordinator",
    "IntermediateTensors",
    "ModelRegistry",
    "RMSNorm",
    "RowParallelLinear",
    "UnquantizedLinearMethod",
    "get_forward_context",
    "get_tp_group",
    "is_forward_context_available",
    "make_empty_intermediate_tensors_factory",
    "set_model_tag",
    "support_torch_compile",
]
