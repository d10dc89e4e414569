# SPDX-License-Identifier: Apache-2.0
"""Runs one scenario in this process. `runner` preloads this module into a fork server, so vLLM is imported once."""

import gc
import importlib
import os
from typing import Any

from real_vllm import cpu_host
from real_vllm.image_model import image, stand_in_for_torchvision
from real_vllm.scenario import Outcome, PromptRequest, Scenario

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.update(ENVIRONMENT)

import torch  # noqa: E402
import vllm  # noqa: E402 - vLLM reads the variables above when it is imported
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402
from vllm.sampling_params import StructuredOutputsParams  # noqa: E402
from vllm.v1.engine import core  # noqa: E402

MAX_STEPS = 20_000
BOS_ID = 0

# vLLM inspects each architecture in a process of its own, which would import everything again.
registry._run_in_subprocess = lambda function: function()

# vLLM imports most of itself when its names are first used, 1,500 modules for an engine: once, before the fork.
_IMPORTED_BEFORE_THE_FORK = (
    "entrypoints.launchers.cli_args",
    "entrypoints.llm",
    "model_executor.layers.quantization.compressed_tensors",
    "model_executor.models.qwen3",
    "v1.core.sched.async_scheduler",
    "v1.engine.llm_engine",
    "v1.worker.cpu_worker",
)
for _name in _IMPORTED_BEFORE_THE_FORK:
    importlib.import_module(f"vllm.{_name}")


def _collect_no_imports() -> None:
    """Keep the collector off what was imported: each engine calls it some eight times, and each walk copies every page in the fork."""
    gc.collect()
    gc.freeze()
    # What an engine makes must stay collectable, and its end must not thaw the imports.
    core.freeze_gc_heap = lambda: None
    gc.unfreeze = lambda: None


_collect_no_imports()


def run(scenario: Scenario) -> Outcome:
    """Build the engine, feed it the scenario's requests step by step, collect what came out, and take the engine down."""
    for name in scenario.host_patches:
        getattr(cpu_host, name)()
    arguments: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
        "disable_log_stats": False,
        **scenario.engine_arguments,
    }
    if scenario.scheduler_cls is not None:
        arguments["scheduler_cls"] = scenario.scheduler_cls
    if any(request.images for request in scenario.requests):
        stand_in_for_torchvision()
    engine = vllm.LLM(str(scenario.model), **arguments).llm_engine
    try:
        return _Run(engine, scenario).outcome()
    finally:
        engine.engine_core.shutdown()
        del engine
        gc.collect()


class _Run:
    def __init__(self, engine: Any, scenario: Scenario) -> None:
        self._engine = engine
        self._requests = scenario.requests
        self._interventions = scenario.interventions
        self._tokens: list[tuple[int, ...]] = [() for _ in self._requests]
        self._reasons: list[str | None] = [None for _ in self._requests]
        self._logprobs: list[tuple[float, ...] | None] = [None for _ in self._requests]
        self._embeddings: list[tuple[float, ...]] = [() for _ in self._requests]
        self._order: list[int] = []
        self._answers: list[Any] = []
        self._num_steps = 0

    def outcome(self) -> Outcome:
        while None in self._reasons:
            if self._num_steps >= MAX_STEPS:
                open_requests = [index for index, reason in enumerate(self._reasons) if reason is None]
                raise TimeoutError(f"requests {open_requests} are unfinished after {MAX_STEPS} steps")
            self._intervene()
            self._abort()
            self._add_arrivals()
            self._take_step()
        counters = self._counters()
        core = getattr(self._engine.engine_core, "engine_core", None)
        scheduler = core.scheduler if core else None
        return Outcome(
            token_ids=tuple(self._tokens),
            finish_reasons=tuple(str(reason) for reason in self._reasons),
            num_steps=self._num_steps,
            num_preemptions=counters["vllm:num_preemptions"],
            num_cached_tokens=counters["vllm:prefix_cache_hits"],
            num_query_tokens=counters["vllm:prefix_cache_queries"],
            scheduler_name=f"{type(scheduler).__module__}.{type(scheduler).__qualname__}" if scheduler else "",
            encoder_limits=_encoder_limits(scheduler) if scheduler else (0, 0),
            finish_order=tuple(self._order),
            counters=counters,
            prompt_logprobs=tuple(self._logprobs),
            embeddings=tuple(self._embeddings),
            answers=tuple(self._answers),
            num_batches_in_flight=core.batch_queue_size if core else 0,
            num_external_tokens=counters.get("vllm:external_prefix_cache_hits", 0),
        )

    def _intervene(self) -> None:
        for intervention in self._interventions:
            if intervention.step == self._num_steps:
                core = self._engine.engine_core.engine_core
                self._answers.append(getattr(core, intervention.method)(**intervention.arguments))

    def _add_arrivals(self) -> None:
        for index, request in enumerate(self._requests):
            if request.chunks:
                self._send_chunks(index, request)
            elif request.arrival_step == self._num_steps:
                prompt = self._prompt(request)
                lora = None
                if request.adapter is not None:
                    number = 1 + int.from_bytes(request.adapter.name.encode(), "big") % 1_000_000
                    lora = LoRARequest(request.adapter.name, number, str(request.adapter))
                parameters = self._parameters(request)
                self._engine.add_request(str(index), prompt, parameters, lora_request=lora, priority=request.priority)

    def _prompt(self, request: PromptRequest) -> dict[str, Any]:
        if request.images:
            images = [image(seed) for seed in request.images]
            return {"prompt_token_ids": list(request.prompt_token_ids), "multi_modal_data": {"image": images}}
        if request.embedding_seed is None:
            return {"prompt_token_ids": list(request.prompt_token_ids)}
        rows = torch.randn(
            (max(request.prompt_token_ids) + 1, self._engine.model_config.get_hidden_size()),
            generator=torch.Generator().manual_seed(request.embedding_seed),
        )
        return {"prompt_embeds": rows[list(request.prompt_token_ids)] * 0.02}

    def _parameters(self, request: PromptRequest) -> Any:
        if self._engine.model_config.runner_type == "pooling":
            return vllm.PoolingParams(task="embed")
        sampling = dict(request.sampling)
        if "structured_outputs" in sampling:
            sampling["structured_outputs"] = StructuredOutputsParams(**sampling["structured_outputs"])
        return vllm.SamplingParams(temperature=0.0, max_tokens=request.max_tokens, **sampling)

    def _send_chunks(self, index: int, request: PromptRequest) -> None:
        if request.arrival_step == self._num_steps:
            self._send(index, request.prompt_token_ids, request.max_tokens)
        for chunk in request.chunks:
            if chunk.step == self._num_steps:
                self._send(index, chunk.prompt_token_ids, chunk.max_tokens)
        if request.chunks[-1].step == self._num_steps:
            self._send(index, (BOS_ID,), 1, resumable=False)

    def _send(self, index: int, token_ids: tuple[int, ...], max_tokens: int, *, resumable: bool = True) -> None:
        # What AsyncLLM does with a generator of inputs. In one process each side needs a list of its own: both extend it.
        for add in (
            lambda r: self._engine.output_processor.add_request(r, None, None, 0),
            self._engine.engine_core.add_request,
        ):
            engine_request = self._engine.input_processor.process_inputs(
                str(index),
                {"prompt_token_ids": list(token_ids)},
                vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
                supported_tasks=("generate",),
                resumable=resumable,
            )
            engine_request.external_req_id = str(index)
            add(engine_request)

    def _abort(self) -> None:
        for index, request in enumerate(self._requests):
            if request.abort_after_tokens is None or self._reasons[index] or request.arrival_step >= self._num_steps:
                continue
            if len(self._tokens[index]) >= request.abort_after_tokens:
                self._engine.abort_request([str(index)])
                self._reasons[index] = "abort"

    def _take_step(self) -> None:
        for output in self._engine.step():
            self._note(int(output.request_id), output)
        self._num_steps += 1

    def _note(self, index: int, output: Any) -> None:
        if hasattr(output, "outputs") and isinstance(output.outputs, list):
            completion = output.outputs[0]
            self._tokens[index] = tuple(completion.token_ids)
            reason = completion.finish_reason
            if output.prompt_logprobs:
                self._logprobs[index] = _prompt_logprobs(output)
        else:
            self._embeddings[index] = tuple(output.outputs.data.tolist())
            reason = "stop"
        if output.finished:
            self._reasons[index] = reason
            self._order.append(index)

    def _counters(self) -> dict[str, int]:
        totals: dict[str, int] = {}
        for metric in self._engine.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                totals[metric.name] = totals.get(metric.name, 0) + int(value)
        return totals


def _prompt_logprobs(output: Any) -> tuple[float, ...]:
    """The log probability of each prompt token after the first, which has none."""
    entries = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return tuple(entry[token].logprob for token, entry in entries)


def _encoder_limits(scheduler: Any) -> tuple[int, int]:
    core = getattr(scheduler, "_core", None)
    if core is not None:
        return core.encoder_limits.step_embeds, core.encoder_limits.cache_embeds
    return scheduler.max_num_encoder_input_tokens, scheduler.encoder_cache_manager.cache_size
