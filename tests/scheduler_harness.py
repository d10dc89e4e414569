# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 - vLLM reads its environment variables when it is imported
"""Builds a vLLM scheduler, its configuration and its requests without a model, on vLLM 0.32 and 0.33."""

from __future__ import annotations

import functools
import importlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

for _key, _value in {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}.items():
    os.environ.setdefault(_key, _value)

import multimodal_stub
import torch
from scheduler_knobs import Knobs
from vllm.config import (
    CacheConfig,
    LoRAConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.config.kv_transfer import KVTransferConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tokenspeed_plugin.host.schedulers import FLAT_KV_PATHS

STOCK_SYNC = "vllm.v1.core.sched.scheduler.Scheduler"
STOCK_ASYNC = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
OURS = "tokenspeed_plugin.scheduler_fsm.TokenSpeedScheduler"
FLAT_SYNC, FLAT_ASYNC = FLAT_KV_PATHS
SCHEDULERS = ("vllm", "tokenspeed")

_STUB_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 131072,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def resolve_class(path_or_class: str | type) -> type:
    """The class behind a dotted path; a class is returned as it is."""
    if isinstance(path_or_class, type):
        return path_or_class
    module, _, name = path_or_class.rpartition(".")
    return getattr(importlib.import_module(module), name)


def class_of(scheduler: str, knobs: Knobs) -> str:
    """Dotted path behind a value of `--scheduler`, of vLLM's synchronous or asynchronous class as the knobs need.

    `flat` is vLLM's scheduler with `--kv-manager flat`.
    """
    if scheduler == "tokenspeed":
        return OURS
    if scheduler == "flat":
        return FLAT_ASYNC if knobs.is_async else FLAT_SYNC
    return STOCK_ASYNC if knobs.is_async else STOCK_SYNC


@functools.lru_cache(maxsize=1)
def _stub_model_dir() -> str:
    folder = tempfile.mkdtemp(prefix="stub-model-")
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(_STUB_MODEL, file)
    return folder


@functools.lru_cache(maxsize=64)
def _model_config(max_model_len: int, pooling: bool) -> ModelConfig:
    return ModelConfig(
        model=_stub_model_dir(),
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        dtype="float32",
        seed=0,
        enforce_eager=True,
        runner="pooling" if pooling else "generate",
    )


def make_vllm_config(knobs: Knobs) -> VllmConfig:
    """A VllmConfig for a CPU process; async scheduling is set after vLLM's CPU platform has forced it off."""
    scheduler = SchedulerConfig(
        max_num_seqs=knobs.max_num_seqs,
        max_num_batched_tokens=max(knobs.budget_tokens, knobs.max_num_seqs * (1 + knobs.num_spec_tokens)),
        max_model_len=knobs.max_model_len,
        async_scheduling=False,
        is_encoder_decoder=False,
        policy=knobs.policy,
        long_prefill_token_threshold=knobs.long_prefill_threshold_tokens,
        **{"enable_chunked_prefill": True, **knobs.scheduler},
    )
    cache = CacheConfig(block_size=knobs.groups[0].block_tokens, enable_prefix_caching=knobs.prefix_caching)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    config = VllmConfig(
        model_config=_model_config(knobs.max_model_len, knobs.pooling),
        scheduler_config=scheduler,
        cache_config=cache,
        parallel_config=ParallelConfig(),
        lora_config=_lora_config(knobs),
        kv_transfer_config=_transfer_config(knobs),
        additional_config=dict(knobs.additional_config),
    )
    if knobs.num_spec_tokens:
        config.speculative_config = _ngram_config(config, knobs.num_spec_tokens)
        # A scheduler asks the configuration for the method alone; a drafter's checkpoint is the workers' business.
        config.speculative_config.method = knobs.draft_method
    config.observability_config = ObservabilityConfig(**knobs.observability)
    # From here on the flags that vLLM's CPU platform refuses, but a scheduler alone can honour.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if knobs.runner == "v2" else "0"
    config.scheduler_config.async_scheduling = knobs.is_async
    config.parallel_config.pipeline_parallel_size = knobs.pp_size
    config.parallel_config.decode_context_parallel_size = knobs.num_context_ranks
    config.cache_config.num_gpu_blocks = knobs.num_blocks + 1
    return config


def _lora_config(knobs: Knobs) -> LoRAConfig | None:
    if not knobs.num_lora_adapters:
        return None
    return LoRAConfig(max_loras=knobs.num_lora_adapters, max_lora_rank=8, max_cpu_loras=64)


def _transfer_config(knobs: Knobs) -> KVTransferConfig | None:
    if knobs.connector is None:
        return None
    module, _, name = knobs.connector.rpartition(".")
    return KVTransferConfig(
        kv_connector=name,
        kv_connector_module_path=module,
        kv_role="kv_both",
        kv_connector_extra_config=dict(knobs.connector_options),
        kv_load_failure_policy=knobs.load_failure_policy,
    )


def _ngram_config(config: VllmConfig, num_spec_tokens: int) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=num_spec_tokens,
        prompt_lookup_max=4,
        prompt_lookup_min=2,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )


def make_kv_cache_config(knobs: Knobs) -> KVCacheConfig:
    """One KV cache group per entry of `knobs.groups`, all drawing on one pool of blocks."""
    groups = []
    for index, group in enumerate(knobs.groups):
        # `knobs` count the tokens behind a block number; each rank of context parallelism holds its share of them.
        num_ranks = knobs.num_context_ranks if group.window_tokens is None else 1
        shape = {"block_size": group.block_tokens // num_ranks, "num_kv_heads": 1, "head_size": 8}
        dtype = torch.float16 if knobs.zero_blocks and index else torch.float32
        spec = (
            FullAttentionSpec(**shape, dtype=dtype)
            if group.window_tokens is None
            else SlidingWindowSpec(**shape, dtype=dtype, sliding_window=group.window_tokens)
        )
        if group.window_is_chunk:
            spec = ChunkedLocalAttentionSpec(**shape, dtype=dtype, attention_chunk_size=group.window_tokens)
        if group.keeps_state:
            mode = "align" if knobs.prefix_caching else "none"
            spec = MambaSpec(
                block_size=group.block_tokens, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode=mode
            )
        groups.append(KVCacheGroupSpec([f"layer{index}"], spec))
    return KVCacheConfig(num_blocks=knobs.num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups)


@dataclass
class Harness:
    """A scheduler with what EngineCore would have around it."""

    knobs: Knobs
    scheduler: Any
    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    block_hasher: Callable[[Request], list[Any]] | None

    def make_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        eos_token_id: int | None = None,
        stop_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
        lora_id: int = 0,
        resumable: bool = False,
        images: Sequence[Any] = (),
        session_id: str | None = None,
        **sampling: Any,
    ) -> Request:
        """A text generation request as EngineCore hands it to `add_request`."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=list(stop_token_ids),
            ignore_eos=eos_token_id is None,
            **sampling,
        )
        params.update_from_generation_config({}, eos_token_id)
        lora = LoRARequest(f"adapter{lora_id}", lora_id, "adapter") if lora_id else None
        return Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            mm_features=[image.feature() for image in images],
            sampling_params=params,
            pooling_params=None,
            priority=priority,
            arrival_time=arrival_time,
            cache_salt=cache_salt,
            lora_request=lora,
            block_hasher=self.block_hasher,
            resumable=resumable,
            session_id=session_id,
        )

    def make_pooling_request(self, request_id: str, prompt: Sequence[int]) -> Request:
        """An embedding request: it ends when its whole prompt has been computed and samples nothing."""
        return Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=None,
            pooling_params=PoolingParams(task="embed"),
            block_hasher=self.block_hasher,
        )


def make_harness(scheduler_class: str | type, knobs: Knobs, **overrides: Any) -> Harness:
    """Builds `scheduler_class` the way EngineCore does, with keyword arguments and one block hasher.

    Args:
        scheduler_class: a class or its dotted path.
        overrides: further keyword arguments for the scheduler (`include_finished_set`, ...).
    """
    config = make_vllm_config(knobs)
    kv_config = make_kv_cache_config(knobs)
    block_tokens, hash_tokens = _resolve_block_tokens(knobs)
    arguments: dict[str, Any] = {
        "vllm_config": config,
        "kv_cache_config": kv_config,
        "structured_output_manager": StructuredOutputManager(config),
        "block_size": block_tokens,
        "hash_block_size": hash_tokens,
        "log_stats": True,
    }
    with (
        mock.patch("tokenspeed_plugin.kv_flat.groups.MOST_MATCH_TOKENS", knobs.match_tokens),
        multimodal_stub.taking(knobs.encoder_step_embeds, knobs.encoder_cache_embeds),
    ):
        scheduler = resolve_class(scheduler_class)(**(arguments | overrides))
    lookahead_tokens = getattr(config, "num_hash_lookahead_tokens", 0)
    hasher = None
    if knobs.prefix_caching or knobs.connector:
        hasher = _block_hasher(scheduler_class, hash_tokens, *([lookahead_tokens] if lookahead_tokens else []))
    return Harness(knobs, scheduler, config, kv_config, hasher)


def _resolve_block_tokens(knobs: Knobs) -> tuple[int, int]:
    sizes = [group.block_tokens for group in knobs.groups]
    largest, smallest = max(sizes), min(sizes)
    if any(largest % size or size % smallest for size in sizes):
        raise ValueError(f"block sizes {sizes} must divide each other")
    return largest, smallest


def _block_hasher(
    scheduler_class: str | type, hash_tokens: int, *lookahead_tokens: int
) -> Callable[[Request], list[Any]]:
    """The hasher EngineCore would make once the scheduler exists; a scheduler of ours may have put its own there."""
    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    factory = get_request_block_hasher
    if not resolve_class(scheduler_class).__module__.startswith("vllm."):
        factory = importlib.import_module("vllm.v1.engine.core").get_request_block_hasher
    return factory(hash_tokens, function, *lookahead_tokens)
