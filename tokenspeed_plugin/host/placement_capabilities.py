# SPDX-License-Identifier: Apache-2.0
"""What `--placement` relies on in vLLM, beside `host.capabilities`."""

from tokenspeed_plugin.host.capabilities import Capability

_LAYERS = "vllm.model_executor.layers."

# What `--placement` relies on. Reductions are switched off on the layers that vLLM built, so the switches must be there.
PLACEMENT: tuple[Capability, ...] = (
    Capability("vllm.model_executor.models.registry:ModelRegistry", attributes=("models", "register_model")),
    Capability("vllm.compilation.decorators:support_torch_compile"),
    Capability("vllm.compilation.backends:set_model_tag", parameters=("tag",)),
    Capability("vllm.distributed.parallel_state:get_tp_group"),
    Capability(
        "vllm.distributed.parallel_state:GroupCoordinator",
        attributes=("all_reduce", "all_gather", "reduce_scatter"),
    ),
    Capability("vllm.forward_context:ForwardContext", fields=("is_padding",)),
    Capability("vllm.forward_context:get_forward_context"),
    Capability("vllm.forward_context:is_forward_context_available"),
    Capability("vllm.sequence:IntermediateTensors", parameters=("tensors",)),
    Capability(
        "vllm.model_executor.models.utils:make_empty_intermediate_tensors_factory", parameters=("keys", "hidden_size")
    ),
    Capability(_LAYERS + "linear:RowParallelLinear", parameters=("reduce_results", "disable_tp", "prefix")),
    Capability(_LAYERS + "linear:RowParallelLinear.forward", parameters=("input_",)),
    Capability(_LAYERS + "linear:UnquantizedLinearMethod.apply", parameters=("layer", "x", "bias")),
    Capability(_LAYERS + "linear:MergedColumnParallelLinear", parameters=("disable_tp", "prefix")),
    Capability(_LAYERS + "vocab_parallel_embedding:VocabParallelEmbedding", parameters=("reduce_results",)),
    Capability(_LAYERS + "layernorm:RMSNorm.forward_native", parameters=("x", "residual")),
    Capability(_LAYERS + "layernorm:GemmaRMSNorm.forward_native", parameters=("x", "residual")),
    Capability(_LAYERS + "fused_moe.config:FusedMoEConfig", fields=("skip_final_all_reduce", "moe_parallel_config")),
    Capability(_LAYERS + "fused_moe.config:FusedMoEParallelConfig", attributes=("use_all2all_kernels",)),
)
