# SPDX-License-Identifier: Apache-2.0
"""Every vLLM object that is relied on, with the methods, parameters and fields that must be there.

`host.check` walks this table; what is missing is reported by the name it has here.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Capability:
    """What is relied on of one vLLM object.

    Attributes:
        target: `module:object` or `module:object.attribute`.
        parameters: parameters that a call passes, for functions and methods.
        fields: fields of a dataclass or msgspec struct that are set or read.
        attributes: methods, properties, enum members, and what a protocol declares.
    """

    target: str
    parameters: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    attributes: tuple[str, ...] = field(default=())


INTERFACE = "vllm.v1.core.sched.interface:SchedulerInterface"
_OUTPUT = "vllm.v1.core.sched.output:"
_ENGINE = "vllm.v1.engine:"
_STATS = "vllm.v1.metrics.stats:"
_SPEC = "vllm.v1.kv_cache_interface:"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector."

# What register() needs before anything else of vLLM is imported.
START: tuple[Capability, ...] = (
    Capability("vllm.engine.arg_utils:EngineArgs", fields=("scheduler_cls", "async_scheduling", "additional_config")),
    Capability("vllm.engine.arg_utils:EngineArgs.add_cli_args", parameters=("parser",)),
    Capability("vllm.engine.arg_utils:EngineArgs.create_engine_config", parameters=("self",)),
)

# Parameters by keyword name: EngineCore and its callers pass them so.
SCHEDULER_METHODS: dict[str, tuple[str, ...]] = {
    "__init__": (
        "self",
        "vllm_config",
        "kv_cache_config",
        "structured_output_manager",
        "block_size",
        "hash_block_size",
        "mm_registry",
        "include_finished_set",
        "log_stats",
    ),
    "schedule": ("self", "throttle_prefills"),
    "get_grammar_bitmask": ("self", "scheduler_output"),
    "update_from_output": ("self", "scheduler_output", "model_runner_output"),
    "update_draft_token_ids": ("self", "draft_token_ids"),
    "update_draft_token_ids_in_output": ("self", "draft_token_ids", "scheduler_output"),
    "add_request": ("self", "request"),
    "finish_requests": ("self", "request_ids", "finished_status"),
    "get_num_unfinished_requests": ("self",),
    "has_finished_requests": ("self",),
    "set_pause_state": ("self", "pause_state"),
    "reset_prefix_cache": ("self", "reset_running_requests", "reset_connector"),
    "reset_encoder_cache": ("self",),
    "get_request_counts": ("self",),
    "make_stats": ("self",),
    "shutdown": ("self",),
    "has_unfinished_requests": ("self",),
    "has_requests": ("self",),
    "get_kv_cache_usage": ("self",),
    "get_kv_connector": ("self",),
    "get_ec_connector": ("self",),
    "get_kv_event_publisher_config": ("self",),
}

# Abstract members that the scheduler implements beside the methods above: a property, and what is abstract since 0.33 only.
OTHER_ABSTRACT_MEMBERS = frozenset({"pause_state", "has_request"})

SCHEDULER: tuple[Capability, ...] = (
    *(Capability(f"{INTERFACE}.{name}", parameters=params) for name, params in SCHEDULER_METHODS.items()),
    Capability(INTERFACE, attributes=("pause_state",)),
    Capability("vllm.v1.core.sched.interface:PauseState", attributes=("UNPAUSED", "PAUSED_NEW", "PAUSED_ALL")),
    Capability(
        _OUTPUT + "SchedulerOutput",
        fields=(
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "total_num_scheduled_tokens",
            "scheduled_spec_decode_tokens",
            "scheduled_encoder_inputs",
            "finished_req_ids",
            "free_encoder_mm_hashes",
            "preempted_req_ids",
            "has_structured_output_requests",
            "pending_structured_output_tokens",
            "new_block_ids_to_zero",
            "has_sync_kv_loads",
            "kv_connector_metadata",
            "kv_connector_block_state",
            "kv_cache_block_copies",
            "num_common_prefix_blocks",
        ),
    ),
    Capability(
        _OUTPUT + "NewRequestData",
        fields=(
            "req_id",
            "prompt_token_ids",
            "mm_features",
            "sampling_params",
            "pooling_params",
            "block_ids",
            "num_computed_tokens",
            "lora_request",
            "prefill_token_ids",
        ),
    ),
    Capability(
        _OUTPUT + "CachedRequestData",
        fields=(
            "req_ids",
            "resumed_req_ids",
            "new_token_ids",
            "all_token_ids",
            "new_block_ids",
            "num_computed_tokens",
            "num_output_tokens",
        ),
    ),
    Capability(_OUTPUT + "GrammarOutput", fields=("structured_output_request_ids", "grammar_bitmask")),
    Capability(
        _ENGINE + "EngineCoreOutput",
        fields=(
            "request_id",
            "new_token_ids",
            "new_logprobs",
            "new_prompt_logprobs_tensors",
            "finish_reason",
            "stop_reason",
            "events",
            "kv_transfer_params",
            "trace_headers",
            "prefill_stats",
            "num_nans_in_logits",
        ),
    ),
    Capability(
        _ENGINE + "EngineCoreOutputs",
        fields=("engine_index", "outputs", "scheduler_stats", "timestamp", "finished_requests"),
    ),
    Capability(_ENGINE + "EngineCoreEvent.new_event", parameters=("event_type", "timestamp")),
    Capability(_ENGINE + "EngineCoreEventType", attributes=("QUEUED", "SCHEDULED", "PREEMPTED")),
    Capability(_ENGINE + "FinishReason", attributes=("STOP", "LENGTH", "ABORT", "ERROR", "REPETITION")),
    Capability(
        "vllm.v1.request:RequestStatus",
        attributes=(
            "WAITING",
            "WAITING_FOR_STREAMING_REQ",
            "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
            "WAITING_FOR_REMOTE_KVS",
            "RUNNING",
            "PREEMPTED",
            "FINISHED_STOPPED",
            "FINISHED_LENGTH_CAPPED",
            "FINISHED_ABORTED",
            "FINISHED_IGNORED",
            "FINISHED_ERROR",
            "FINISHED_REPETITION",
            "is_finished",
            "get_finished_reason",
        ),
    ),
    Capability(
        "vllm.v1.request:Request",
        attributes=("is_finished", "get_finished_reason", "record_event", "take_events", "take_prefill_stats"),
    ),
    Capability(
        "vllm.v1.outputs:ModelRunnerOutput",
        fields=("req_ids", "req_id_to_index", "sampled_token_ids", "logprobs", "prompt_logprobs_dict"),
    ),
    Capability("vllm.v1.outputs:DraftTokenIds", fields=("req_ids", "draft_token_ids")),
    Capability(
        _STATS + "SchedulerStats",
        fields=(
            "num_running_reqs",
            "num_waiting_reqs",
            "kv_cache_usage",
            "prefix_cache_stats",
            "kv_cache_eviction_events",
            "spec_decoding_stats",
            "connector_prefix_cache_stats",
            "kv_connector_stats",
            "num_kv_fetch_reqs_by_stage",
            "perf_stats",
        ),
    ),
    Capability(_STATS + "KVCacheEvictionEvent", fields=("lifetime_seconds", "idle_seconds", "reuse_gaps_seconds")),
    Capability(_STATS + "RequestSpecDecodeMetrics.new", parameters=("num_spec_tokens",)),
    Capability(
        _STATS + "RequestSpecDecodeMetrics.observe", parameters=("num_draft_tokens", "num_accepted", "detailed")
    ),
    Capability("vllm.v1.metrics.loggers:StatLoggerManager.__init__", parameters=("vllm_config", "custom_stat_loggers")),
    Capability("vllm.v1.metrics.loggers:AggregateStatLoggerBase", attributes=("record", "log_engine_initialized")),
    Capability("vllm.v1.metrics.perf:ModelMetrics", attributes=("is_enabled", "get_step_perf_stats_per_gpu")),
    Capability(_STATS + "PrefixCacheStats", fields=("reset", "requests", "queries", "hits"), attributes=("record",)),
    Capability(
        _SPEC + "KVCacheConfig",
        fields=("num_blocks", "kv_cache_tensors", "kv_cache_groups"),
        attributes=("needs_kv_cache_zeroing", "has_mamba_layers"),
    ),
    Capability(_SPEC + "KVCacheGroupSpec", fields=("layer_names", "kv_cache_spec")),
    Capability(_SPEC + "FullAttentionSpec", fields=("block_size",)),
    Capability(_SPEC + "SlidingWindowSpec", fields=("block_size", "sliding_window")),
    Capability("vllm.v1.core.kv_cache_utils:KVCacheBlockCopy"),
    Capability("vllm.config.compilation:CompilationConfig", fields=("cudagraph_capture_sizes",)),
    Capability("vllm.multimodal.encoder_budget:MultiModalBudget", parameters=("vllm_config", "mm_registry")),
    Capability("vllm.multimodal.inputs:MultiModalFeatureSpec", fields=("data", "identifier", "mm_position")),
    Capability(_OUTPUT + "ScheduledEncoderInputStats", fields=("num_inputs", "output_tokens")),
    Capability(
        "vllm.multimodal.inputs:PlaceholderRange", fields=("offset", "length"), attributes=("extract_embeds_range",)
    ),
    Capability("vllm.v1.structured_output:StructuredOutputManager.grammar_bitmask"),
    Capability("vllm.v1.utils:tensor_data", parameters=("tensor",)),
    Capability("vllm.v1.outputs:SamplingMaskLists.slice_request", parameters=("req_idx", "num_positions")),
    Capability("vllm.distributed.kv_events:EventPublisherFactory.create", parameters=("config",)),
    Capability(
        "vllm.distributed.kv_events:BlockStored",
        fields=("block_hashes", "parent_block_hash", "token_ids", "block_size"),
    ),
    Capability("vllm.distributed.kv_events:BlockRemoved", fields=("block_hashes",)),
    Capability("vllm.distributed.kv_events:AllBlocksCleared"),
    Capability("vllm.distributed.kv_events:KVEventBatch", fields=("ts", "events")),
    Capability(
        _CONNECTOR + "factory:KVConnectorFactory.create_connector", parameters=("config", "role", "kv_cache_config")
    ),
    Capability(_CONNECTOR + "v1:KVConnectorRole", attributes=("SCHEDULER",)),
    Capability(_CONNECTOR + "v1:SupportsHMA.request_finished_all_groups", parameters=("request", "block_ids")),
    Capability(
        _CONNECTOR + "v1:KVConnectorBase_V1",
        attributes=(
            "requires_kv_delivery",
            "bind_kv_cache_manager",
            "on_new_request",
            "get_num_new_matched_tokens",
            "get_external_cache_hit_sources",
            "update_state_after_alloc",
            "build_connector_meta",
            "update_connector_output",
            "request_finished",
            "take_events",
            "has_pending_push_work",
            "get_kv_connector_stats",
            "reset_cache",
            "shutdown",
        ),
    ),
    Capability(
        "vllm.v1.outputs:KVConnectorOutput",
        fields=("finished_sending", "finished_recving", "invalid_block_ids", "failed_recving", "kv_connector_stats"),
    ),
    Capability(_OUTPUT + "KVConnectorBlockState", fields=("req_ids", "resolve_block_ids", "boundary_state_offloads")),
    Capability("vllm.v1.core.kv_cache_manager:KVCacheBlocks", fields=("blocks",)),
    Capability("vllm.v1.core.kv_cache_utils:KVCacheBlock", fields=("block_id", "ref_cnt", "is_null")),
    Capability(
        "vllm.v1.core.kv_cache_utils:get_request_block_hasher", parameters=("hash_block_size", "caching_hash_fn")
    ),
    Capability("vllm.v1.core.kv_cache_utils:make_block_hash_with_group_id", parameters=("block_hash", "group_id")),
    Capability(
        "vllm.v1.engine.core:get_request_block_hasher",
        parameters=("hash_block_size", "caching_hash_fn"),
    ),
)

# Instance attributes of Request that the adapter reads or keeps in step; set in its constructor.
REQUEST_ATTRIBUTES: tuple[str, ...] = (
    "request_id",
    "client_index",
    "priority",
    "arrival_time",
    "sampling_params",
    "pooling_params",
    "lora_request",
    "structured_output_request",
    "status",
    "events",
    "stop_reason",
    "max_tokens",
    "prompt_token_ids",
    "prompt_embeds",
    "num_prompt_tokens",
    "_output_token_ids",
    "_all_token_ids",
    "num_output_placeholders",
    "num_in_flight_tokens",
    "spec_token_ids",
    "num_computed_tokens",
    "cache_salt",
    "mm_features",
    "trace_headers",
    "is_prefill_chunk",
    "num_nans_in_logits",
    "num_preemptions",
    "prefill_stats",
    "block_hashes",
    "kv_transfer_params",
    "skip_reading_prefix_cache",
    "resumable",
    "session_id",
    "abort_immediately",
)
