# SPDX-License-Identifier: Apache-2.0
"""What `--kv-manager flat` relies on of vLLM's own scheduler: what it passes to its KV cache manager, and how it is built."""

from tokenspeed_plugin.host.capabilities import Capability

KV_MANAGER: tuple[Capability, ...] = (
    Capability(
        "vllm.v1.core.sched.scheduler:KVCacheManager.__init__",
        parameters=(
            "kv_cache_config",
            "max_model_len",
            "hash_block_size",
            "enable_caching",
            "use_eagle",
            "log_stats",
            "enable_kv_cache_events",
            "metrics_collector",
            "watermark",
        ),
    ),
    Capability(
        "vllm.v1.core.sched.scheduler:KVCacheManager.allocate_slots",
        parameters=(
            "request",
            "num_new_tokens",
            "num_new_computed_tokens",
            "new_computed_blocks",
            "num_lookahead_tokens",
            "num_external_computed_tokens",
            "delay_cache_blocks",
            "num_encoder_tokens",
            "full_sequence_must_fit",
            "reserved_blocks",
            "has_scheduled_reqs",
            "skip_zeroing_group_ids",
        ),
    ),
    Capability(
        "vllm.v1.core.sched.scheduler:Scheduler.__init__",
        parameters=("vllm_config", "kv_cache_config", "structured_output_manager", "block_size", "hash_block_size"),
    ),
    Capability("vllm.v1.core.sched.async_scheduler:AsyncScheduler"),
    Capability("vllm.v1.core.kv_cache_metrics:KVCacheMetricsCollector", attributes=("drain_events",)),
    Capability("vllm.v1.kv_cache_interface:get_kv_cache_spec_kind", parameters=("kv_cache_spec",)),
    Capability("vllm.v1.kv_cache_interface:get_kv_cache_spec_sliding_window", parameters=("kv_cache_spec",)),
)
