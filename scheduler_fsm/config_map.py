# SPDX-License-Identifier: Apache-2.0
"""vLLM's configuration, in the core's terms."""

from typing import TYPE_CHECKING

from tokenspeed_plugin.host.differences import num_hash_lookahead_tokens
from tokenspeed_plugin.host.names import build_dynamic_sd_schedule_lookup
from tokenspeed_plugin.kv_flat.groups import Group, groups_from, match_unit_tokens
from tokenspeed_plugin.scheduler_fsm import _core
from tokenspeed_plugin.scheduler_fsm.encoder_inputs import encoder_limits
from tokenspeed_plugin.scheduler_fsm.eviction import eviction_spec
from tokenspeed_plugin.settings import resolve_in_process

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import KVCacheConfig, MultiModalRegistry, VllmConfig

_OVERLOAD = {
    "queue": _core.Overload.QUEUE,
    "refuse": _core.Overload.REFUSE,
    "degrade": _core.Overload.DEGRADE,
}


def scheduler_config(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", key_tokens: int, mm_registry: "MultiModalRegistry"
) -> _core.SchedulerConfig:
    """What the core decides by.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: its groups and the number of blocks.
        key_tokens: tokens per prefix key.
        mm_registry: knows the processors of multimodal models.
    """
    vllm = vllm_config.scheduler_config
    config = _core.SchedulerConfig()
    config.kv = kv_config(vllm_config, kv_cache_config, key_tokens)
    config.policy = _core.QueuePolicy.PRIORITY if vllm.policy == "priority" else _core.QueuePolicy.FCFS
    config.max_num_seqs = vllm.max_num_seqs
    config.max_num_active_seqs = vllm.max_num_active_seqs or 0
    config.max_scheduled_tokens = vllm.max_num_scheduled_tokens or vllm.max_num_batched_tokens
    config.max_model_tokens = vllm_config.model_config.max_model_len
    config.long_prefill_tokens = vllm.long_prefill_token_threshold
    config.long_prefill_adaptive = vllm.long_prefill_token_threshold_adaptive
    # Ranks of a data-parallel engine keep their prefills in the same steps; there EngineCore counts, and says so in each step.
    if vllm_config.parallel_config.data_parallel_size == 1:
        config.prefill_interval_steps = vllm.prefill_schedule_interval
    config.chunked_prefill = vllm.enable_chunked_prefill
    config.reserve_full_sequence = vllm.scheduler_reserve_full_isl
    config.watermark = vllm.watermark
    config.async_scheduling = bool(vllm.async_scheduling)
    if config.async_scheduling and vllm_config.use_v2_model_runner:
        # The V2 runner hands sampled tokens from the last pipeline stage to the first through a ring of as many places.
        config.decode_stagger_steps = vllm_config.parallel_config.pipeline_parallel_size
    if vllm_config.model_config.runner_type == "pooling":
        config.num_sampled_tokens = 0
    if vllm_config.lora_config is not None:
        config.max_adapters = vllm_config.lora_config.max_loras
    config.encoder = encoder_limits(vllm_config, mm_registry)
    settings = resolve_in_process(vllm_config.additional_config).values
    config.target_tps = settings.target_tps_per_user
    config.overload = _OVERLOAD[settings.target_overload]
    config.graph_sizes = vllm_config.compilation_config.cudagraph_capture_sizes or []
    _set_speculation(config, vllm_config)
    return config


def key_tokens(kv_cache_config: "KVCacheConfig", hash_block_size: int) -> int:
    """Tokens per prefix key; divides vLLM's `hash_block_size`."""
    return match_unit_tokens(kv_cache_config.kv_cache_groups, hash_block_size)


def _set_speculation(config: _core.SchedulerConfig, vllm_config: "VllmConfig") -> None:
    speculation = vllm_config.speculative_config
    if speculation is None:
        return
    config.num_draft_tokens = vllm_config.num_speculative_tokens
    config.lookahead_tokens = vllm_config.num_lookahead_tokens
    config.drafter_slots = speculation.max_num_new_slots_for_drafting
    # What the drafter keeps of a block's last token depends on the token behind it: either keys name that token as well, or
    # the last block of a match is computed again.
    config.drop_last_match_block = speculation.use_eagle_block_drop() and not num_hash_lookahead_tokens(vllm_config)
    if speculation.num_speculative_tokens_per_batch_size:
        config.draft_tokens_by_batch = build_dynamic_sd_schedule_lookup(
            speculation.num_speculative_tokens_per_batch_size,
            vllm_max_batch_size=config.max_num_seqs,
            vllm_num_speculative_tokens=config.num_draft_tokens,
        )


def kv_config(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", key_tokens: int) -> _core.KvConfig:
    """What the flat KV manager is built from."""
    events = vllm_config.kv_events_config
    config = _core.KvConfig()
    # A model that keeps no KV gets one block from vLLM, the null block; the core wants one beside it.
    config.num_blocks = max(kv_cache_config.num_blocks, 2)
    config.key_tokens = key_tokens
    config.in_flight_tokens = vllm_config.max_in_flight_tokens
    config.prefix_caching = bool(vllm_config.cache_config.enable_prefix_caching)
    config.record_events = events is not None and events.enable_kv_cache_events
    config.eviction = eviction_spec(resolve_in_process(vllm_config.additional_config).values.kv_eviction)
    observability = vllm_config.observability_config
    if observability.kv_cache_metrics:
        config.residency_sample_rate = observability.kv_cache_metrics_sample
    config.groups = [
        _core.GroupSpec(
            name=group.name,
            block_tokens=group.block_tokens,
            retention=_retention(group),
            window_tokens=group.window_tokens or 0,
        )
        for group in groups_from(
            kv_cache_config.kv_cache_groups, vllm_config.parallel_config.decode_context_parallel_size
        )
    ]
    return config


def _retention(group: Group) -> _core.Retention:
    if group.keeps_state:
        return _core.Retention.STATE
    if group.window_tokens is None:
        return _core.Retention.FULL
    return _core.Retention.CHUNK if group.window_is_chunk else _core.Retention.SLIDING_WINDOW


def runner_protocol(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> _core.RunnerProtocol:
    """Which of vLLM's two model runners reads the plans, and what it wants in them."""
    is_v2 = bool(vllm_config.use_v2_model_runner)
    is_pipeline = vllm_config.parallel_config.pipeline_parallel_size > 1
    return _core.RunnerProtocol(
        resumed_as_new=is_v2,
        sends_history=not is_v2,
        sends_new_tokens=is_pipeline and not vllm_config.scheduler_config.async_scheduling,
        zeroes_blocks=bool(kv_cache_config.needs_kv_cache_zeroing),
    )
