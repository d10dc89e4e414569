# SPDX-License-Identifier: Apache-2.0
"""What `--kernels` relies on in vLLM, beside `host.capabilities`."""

from tokenspeed_plugin.host.capabilities import Capability

_MLA = "vllm.model_executor.layers.attention.mla_attention:"
_FLASH = "vllm.v1.attention.backends.mla.flashattn_mla:"
_FLASHMLA = "vllm.v1.attention.backends.mla.flashmla:"

KERNELS: tuple[Capability, ...] = (
    Capability("vllm.v1.attention.backends.registry:register_backend", parameters=("backend", "class_path")),
    Capability(
        "vllm.v1.attention.backends.registry:AttentionBackendEnum",
        attributes=("CUSTOM", "FLASH_ATTN_MLA", "FLASHMLA", "get_path", "is_overridden", "clear_override"),
    ),
    Capability("vllm.config.attention:AttentionConfig", fields=("backend", "backend_per_kind")),
    Capability(
        _MLA + "MLACommonMetadataBuilder._build_decode",
        parameters=(
            "block_table_tensor",
            "seq_lens_device",
            "max_seq_len",
            "query_start_loc_cpu",
            "query_start_loc_device",
            "num_decode_tokens",
            "max_query_len",
            "dcp_tot_seq_lens_device",
        ),
    ),
    Capability(_MLA + "MLACommonMetadataBuilder.build_for_cudagraph_capture", parameters=("common_attn_metadata",)),
    Capability(_MLA + "MLACommonImpl.forward_mqa", parameters=("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer")),
    Capability(_MLA + "MLADims", fields=("kv_lora_rank", "qk_rope_head_dim")),
    Capability(_MLA + "MLACommonDecodeMetadata", fields=("block_table", "seq_lens", "dcp_tot_seq_lens")),
    # Prefill on a cached prefix: taken from the override of `forward_mha`, planned in that of `build`.
    Capability(
        _MLA + "MLACommonBaseImpl.forward_mha",
        parameters=(
            "q",
            "kv_c_normed",
            "k_pe",
            "kv_c_and_k_pe_cache",
            "attn_metadata",
            "k_scale",
            "output",
            "output_scale",
        ),
    ),
    Capability(
        _MLA + "MLACommonMetadataBuilder.build",
        parameters=("common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    Capability(_MLA + "MLACommonPrefillMetadata", fields=("block_table", "query_lens_cpu", "chunked_context")),
    Capability(_MLA + "MLACommonPrefillMetadata.ChunkedContextMetadata", fields=("context_lens_list",)),
    Capability(
        _MLA + "MLAAttention.__init__",
        parameters=("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "kv_b_proj"),
    ),
    Capability(
        "vllm.v1.attention.backend:CommonAttentionMetadata",
        fields=("max_query_len", "query_start_loc_cpu", "seq_lens_cpu_upper_bound"),
    ),
    Capability("vllm.config:get_current_vllm_config"),
    Capability("vllm.platforms:current_platform.get_device_capability"),
    Capability("vllm.platforms:current_platform.get_device_name"),
)

# The base of our backend over a bf16 cache; its module can be imported on GPUs only.
FLASH_ATTN_MLA: tuple[Capability, ...] = (
    Capability(
        _FLASH + "FlashAttnMLABackend",
        attributes=("get_supported_kernel_block_sizes", "supports_batch_invariance"),
    ),
    Capability(
        _FLASH + "FlashAttnMLAMetadataBuilder",
        attributes=("query_len_support", "_cudagraph_support", "reorder_batch_threshold"),
    ),
    Capability(
        "vllm.v1.attention.backends.fa_utils:flash_attn_varlen_func",
        parameters=(
            "q",
            "k",
            "v",
            "max_seqlen_q",
            "cu_seqlens_q",
            "max_seqlen_k",
            "cu_seqlens_k",
            "softmax_scale",
            "causal",
            "out",
            "fa_version",
        ),
    ),
    Capability(_FLASH + "FlashAttnMLAImpl.forward_mqa", parameters=("q", "attn_metadata")),
    Capability("vllm.v1.attention.backends.fa_utils:flash_attn_supports_mla"),
)

# The base of our backend over an e4m3 cache, and where a layer has its scales.
FLASHMLA: tuple[Capability, ...] = (
    Capability(
        _FLASHMLA + "FlashMLABackend",
        attributes=("supported_dtypes", "supported_kv_cache_dtypes", "get_supported_kernel_block_sizes"),
    ),
    Capability(
        _FLASHMLA + "FlashMLAMetadataBuilder",
        attributes=("query_len_support", "_cudagraph_support", "reorder_batch_threshold", "_build_decode"),
    ),
    Capability(
        _FLASHMLA + "FlashMLAImpl.forward_mqa", parameters=("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer")
    ),
    Capability("vllm.v1.attention.backend:AttentionLayer", attributes=("_q_scale", "_k_scale")),
    Capability("vllm.v1.attention.backend:MLAAttentionImpl", attributes=("supports_quant_query_input",)),
    Capability("vllm.v1.attention.ops.flashmla:is_flashmla_dense_supported"),
)

# What our MLA layer and its operation rely on.
_WRAPPER = "vllm.model_executor.layers.mla:"
_ROPE = "vllm.model_executor.layers.rotary_embedding"

LINEAR: tuple[Capability, ...] = (
    Capability("vllm.model_executor.layers.linear:dispatch_unquantized_gemm", parameters=("linear_backend",)),
    Capability("vllm.model_executor.layers.linear:UnquantizedLinearMethod", attributes=("apply",)),
    Capability("vllm.config.kernel:KernelConfig", fields=("linear_backend",)),
)

APPEND: tuple[Capability, ...] = (
    Capability("vllm.model_executor.custom_op:PluggableLayer.register_oot", parameters=("name",)),
    Capability("vllm.model_executor.custom_op:op_registry_oot"),
    Capability(
        _WRAPPER + "MultiHeadLatentAttentionWrapper.__init__",
        parameters=("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank", "mla_modules"),
    ),
    Capability(
        _WRAPPER + "MultiHeadLatentAttentionWrapper.forward",
        parameters=("positions", "hidden_states", "llama_4_scaling"),
    ),
    Capability(
        _WRAPPER + "MLAModules",
        fields=(
            "kv_a_layernorm",
            "rotary_emb",
            "o_proj",
            "fused_qkv_a_proj",
            "kv_a_proj_with_mqa",
            "q_a_layernorm",
            "q_b_proj",
            "q_proj",
            "indexer",
            "is_sparse",
        ),
    ),
    Capability(_MLA + "MLAAttention.forward", parameters=("q", "kv_c_normed", "k_pe", "output_shape")),
    Capability(_MLA + "MLAAttention", attributes=("bind_kv_cache", "update_kv_cache")),
    Capability("vllm.v1.attention.backend:MLAAttentionImpl", attributes=("do_kv_cache_update",)),
    Capability("vllm.model_executor.layers.attention.attention:get_attention_context", parameters=("layer_name",)),
    Capability(_ROPE + ":RotaryEmbedding", attributes=("forward_native", "forward_cuda")),
    Capability(
        _ROPE + ".deepseek_scaling_rope:DeepseekScalingRotaryEmbedding", attributes=("forward_native", "forward_cuda")
    ),
    Capability("vllm.model_executor.layers.layernorm:RMSNorm"),
    Capability("vllm.config.compilation:PassConfig", fields=("fuse_rope_kvcache_cat_mla",)),
    Capability("vllm.config.compilation:CompilationConfig", fields=("splitting_ops",)),
    Capability("vllm.config:get_current_vllm_config"),
)
