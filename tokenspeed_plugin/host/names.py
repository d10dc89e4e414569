# SPDX-License-Identifier: Apache-2.0
"""Every vLLM object that the rest of the project uses, under one roof.

Import this module only after `host.check` passed: on an unsupported vLLM it raises ImportError. What differs between the
supported versions is hidden in `host.differences`, never here.
"""

from vllm.config import VllmConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisher,
    EventPublisherFactory,
    KVCacheEvent,
    KVEventBatch,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.multimodal import MULTIMODAL_REGISTRY, MultiModalRegistry
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.outputs import RequestError
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    ExternalBlockHash,
    KVCacheBlock,
    KVCacheBlockCopy,
    generate_block_hash_extra_keys,
    get_request_block_hasher,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import (
    CachedRequestData,
    GrammarOutput,
    KVConnectorBlockState,
    NewRequestData,
    ScheduledEncoderInputStats,
    SchedulerOutput,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_sequence_repetition
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.perf import ModelMetrics, PerfStats
from vllm.v1.metrics.stats import (
    KV_FETCH_COMPLETED_WAITING,
    KV_FETCH_IN_PROGRESS,
    KV_FETCH_WAITING_TO_START,
    CachingMetrics,
    KVCacheEvictionEvent,
    PrefillStats,
    PrefixCacheStats,
    RequestSpecDecodeMetrics,
    SchedulerIterationDetails,
    SchedulerStats,
)
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    DraftTokenIds,
    KVConnectorOutput,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
    SamplingMaskLists,
)
from vllm.v1.request import Request, RequestStatus, StreamingUpdate
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.spec_decode.metrics import SpecDecodingStats
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.utils import strip_speculative_padding
from vllm.v1.utils import ConstantList, tensor_data

__all__ = [
    "EMPTY_MODEL_RUNNER_OUTPUT",
    "KV_FETCH_COMPLETED_WAITING",
    "KV_FETCH_IN_PROGRESS",
    "KV_FETCH_WAITING_TO_START",
    "MEDIUM_GPU",
    "MULTIMODAL_REGISTRY",
    "AggregateStatLoggerBase",
    "AllBlocksCleared",
    "AsyncScheduler",
    "AttentionSpec",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "CachedRequestData",
    "CachingMetrics",
    "ChunkedLocalAttentionSpec",
    "CircularBufferSpec",
    "ConstantList",
    "CrossAttentionSpec",
    "DraftTokenIds",
    "EncoderOnlyAttentionSpec",
    "EngineCoreEvent",
    "EngineCoreEventType",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EventPublisher",
    "EventPublisherFactory",
    "ExternalBlockHash",
    "FinishReason",
    "FullAttentionSpec",
    "GrammarOutput",
    "HiSparseHotSpec",
    "HiSparseResidentSpec",
    "HiddenStateCacheSpec",
    "KVCacheBlock",
    "KVCacheBlockCopy",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheEvent",
    "KVCacheEvictionEvent",
    "KVCacheGroupSpec",
    "KVCacheMetricsCollector",
    "KVCacheSpec",
    "KVCacheTensor",
    "KVConnectorBase_V1",
    "KVConnectorBlockState",
    "KVConnectorFactory",
    "KVConnectorOutput",
    "KVConnectorRole",
    "KVEventBatch",
    "KVEventsConfig",
    "LoRARequest",
    "LogprobsLists",
    "LogprobsTensors",
    "MLAAttentionSpec",
    "MambaSpec",
    "ModelMetrics",
    "ModelRunnerOutput",
    "MultiModalBudget",
    "MultiModalRegistry",
    "NewRequestData",
    "PauseState",
    "PerfStats",
    "PoolingParams",
    "PrefillStats",
    "PrefixCacheStats",
    "RSWASpec",
    "Request",
    "RequestError",
    "RequestSpecDecodeMetrics",
    "RequestStatus",
    "SamplingMaskLists",
    "SamplingParams",
    "ScheduledEncoderInputStats",
    "Scheduler",
    "SchedulerInterface",
    "SchedulerIterationDetails",
    "SchedulerOutput",
    "SchedulerStats",
    "SinkFullAttentionSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "SpecDecodingStats",
    "StreamingUpdate",
    "StructuredOutputManager",
    "SupportsHMA",
    "UniformTypeKVCacheSpecs",
    "VllmConfig",
    "build_dynamic_sd_schedule_lookup",
    "check_sequence_repetition",
    "generate_block_hash_extra_keys",
    "get_kv_cache_spec_kind",
    "get_kv_cache_spec_sliding_window",
    "get_request_block_hasher",
    "init_logger",
    "make_block_hash_with_group_id",
    "maybe_convert_block_hash",
    "strip_speculative_padding",
    "tensor_data",
]
