# SPDX-License-Identifier: Apache-2.0
"""Plane: any class with vLLM's SchedulerInterface, driven as EngineCore drives it, with no model.

A request enters through `EngineCore.preprocess_add_request` and `EngineCore.add_request`, with the block hasher
that `EngineCore.__init__` would look up after it built the scheduler: a scheduler that replaces the hasher is
measured with its replacement.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine import core as engine_core
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.control.driver import PlannedStep, Scheduled, UpdateCost
from benchmarks.control.plane_checks import OutputCheck, PlanCheck
from benchmarks.control.steps import clock_from_environment

MAX_MODEL_TOKENS = 131_072
MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 131_072,
    "max_position_embeddings": MAX_MODEL_TOKENS,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}

_clock_ns = clock_from_environment()


@lru_cache(maxsize=1)
def _model_folder() -> str:
    folder = tempfile.mkdtemp(prefix="control-plane-model-")
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(MODEL_CONFIG, file)
    return folder


def model_config() -> ModelConfig:
    """Return the config of a model that is never built: the scheduler reads lengths and vocabulary from it."""
    return ModelConfig(
        model=_model_folder(),
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_TOKENS,
        dtype="bfloat16",
        seed=0,
        enforce_eager=True,
    )


def _vllm_config(
    block_tokens: int,
    max_requests: int,
    budget_tokens: int,
    depth: int,
    settings: Mapping[str, Any],
    additional_config: Mapping[str, Any],
) -> VllmConfig:
    scheduler = SchedulerConfig(
        max_num_seqs=max_requests,
        max_num_batched_tokens=max(budget_tokens, max_requests),
        max_model_len=MAX_MODEL_TOKENS,
        enable_chunked_prefill=True,
        async_scheduling=depth > 1,
        is_encoder_decoder=False,
        **settings,
    )
    cache = CacheConfig(block_size=block_tokens, enable_prefix_caching=True)
    config = VllmConfig(
        model_config=model_config(),
        scheduler_config=scheduler,
        cache_config=cache,
        additional_config=dict(additional_config),
    )
    config.scheduler_config.async_scheduling = depth > 1  # the CPU platform switches it off
    return config


def greedy(max_tokens: int) -> SamplingParams:
    """Return parameters of a request that emits exactly `max_tokens` tokens."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def arriving_request(request_id: str, prompt: list[int], sampling: SamplingParams) -> EngineCoreRequest:
    """Return a request as the front end hands it to EngineCore."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


@dataclass
class _Progress:
    """What the plane knows of a request from the payloads alone."""

    known_tokens: int
    num_emitted: int = 0


class VllmPlane:
    """Drives `scheduler_class` (a dotted path); `depth` 2 plans a step before the previous one's results."""

    def __init__(
        self,
        scheduler_class: str,
        depth: int = 1,
        *,
        block_tokens: int,
        num_blocks: int,
        max_requests: int,
        budget_tokens: int,
    ) -> None:
        self.name = scheduler_class
        self.depth = depth
        self.num_preemptions = 0
        self._engine = build_engine(scheduler_class, block_tokens, num_blocks, max_requests, budget_tokens, depth)
        self.scheduler = self._engine.scheduler
        self._progress: dict[str, _Progress] = {}
        self._planned: deque[tuple[SchedulerOutput, list[str]]] = deque()
        self._plan_check = PlanCheck(block_tokens)
        self._output_check = OutputCheck()
        self._sampling: dict[int, SamplingParams] = {}

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> int:
        """Submit a request as EngineCore does on arrival; return the nanoseconds taken."""
        if max_tokens not in self._sampling:
            self._sampling[max_tokens] = greedy(max_tokens)
        arrival = arriving_request(request_id, prompt, self._sampling[max_tokens])
        self._progress[request_id] = _Progress(len(prompt))
        start = _clock_ns()
        request, wave = engine_core.EngineCore.preprocess_add_request(self._engine, arrival)
        engine_core.EngineCore.add_request(self._engine, request, wave)
        return _clock_ns() - start

    def plan(self) -> PlannedStep:
        """Call `schedule` and read the step from its payload alone."""
        start = _clock_ns()
        output = self.scheduler.schedule()
        plan_ns = _clock_ns() - start
        self._plan_check.verify(output)
        preempted = output.preempted_req_ids or ()
        if preempted and self.depth > 1:
            raise RuntimeError(f"{self.name}: preempted {sorted(preempted)} at depth {self.depth}")
        self.num_preemptions += len(preempted)
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        first = dict(computed)
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        scheduled: list[Scheduled] = []
        num_prefill = 0
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            progress = self._progress[request_id]
            emits = computed[request_id] + num_tokens == progress.known_tokens
            if num_tokens > 1 or not emits or not progress.num_emitted:
                num_prefill += num_tokens
            if emits:  # at depth 2 the scheduler counts the token as a placeholder from here on
                progress.known_tokens += 1
                progress.num_emitted += 1
            scheduled.append(Scheduled(request_id, num_tokens, emits, first.get(request_id, -1)))
        self._planned.append((output, [item.request_id for item in scheduled]))
        return PlannedStep(scheduled, num_prefill, plan_ns, 0)

    def update(self, emitted: dict[str, int], finished: list[str]) -> UpdateCost:
        """Call `update_from_output` for the oldest planned step and check every output it returns."""
        output, request_ids = self._planned.popleft()
        result = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=[[emitted[r]] if r in emitted else [] for r in request_ids],
        )
        start = _clock_ns()
        outputs = self.scheduler.update_from_output(output, result)
        update_ns = _clock_ns() - start
        self._output_check.verify(outputs, emitted, finished)
        for request_id in finished:
            del self._progress[request_id]
            self._plan_check.forget(request_id)
        return UpdateCost(0, update_ns)


def build_engine(
    scheduler_class: str,
    block_tokens: int,
    num_blocks: int,
    max_requests: int,
    budget_tokens: int,
    depth: int,
    settings: Mapping[str, Any] = MappingProxyType({}),
    additional_config: Mapping[str, Any] = MappingProxyType({}),
    graph_sizes: Sequence[int] = (),
) -> Any:
    """Return what `EngineCore`'s arrival path reads of an engine: scheduler, hasher, managers.

    Args:
        scheduler_class: dotted path.
        settings: further fields of vLLM's `SchedulerConfig`.
        additional_config: vLLM's setting of that name, where ours may be given, too.
        graph_sizes: tokens of a step that CUDA graphs stand for.
    """
    config = _vllm_config(block_tokens, max_requests, budget_tokens, depth, settings, additional_config)
    config.compilation_config.cudagraph_capture_sizes = list(graph_sizes)
    config.cache_config.num_gpu_blocks = num_blocks + 1  # block 0 is the null block
    spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    kv_config = KVCacheConfig(
        num_blocks=num_blocks + 1,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    structured_output = StructuredOutputManager(config)
    scheduler = resolve_obj_by_qualname(scheduler_class)(
        vllm_config=config,
        kv_cache_config=kv_config,
        structured_output_manager=structured_output,
        include_finished_set=False,
        log_stats=True,
        block_size=block_tokens,
        hash_block_size=block_tokens,
    )
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    return SimpleNamespace(
        scheduler=scheduler,
        structured_output_manager=structured_output,
        mm_receiver_cache=None,
        request_block_hasher=engine_core.get_request_block_hasher(block_tokens, hash_function),
    )
