# SPDX-License-Identifier: Apache-2.0
"""Measurements inside an engine process: throughput at the engine core, profile of a step, greedy tokens."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.workload import batch_of_prompts, mixed_prompts


def _requests(
    prompts: list[list[int]],
    num_output_tokens: int,
    label: str,
    forced: list[int] | None = None,
    extra: dict[str, Any] | None = None,
) -> list[Any]:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    common = {
        "temperature": 0.0,
        "max_tokens": num_output_tokens,
        "ignore_eos": True,
        "detokenize": False,
        "extra_args": extra,
    }
    return [
        EngineCoreRequest(
            request_id=f"{label}-{index}",
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=SamplingParams(**common, allowed_token_ids=[forced[index]] if forced else None),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        for index, prompt in enumerate(prompts)
    ]


def serve_batch(
    llm: Any,
    prompts: list[list[int]],
    num_output_tokens: int,
    label: str,
    forced: list[int] | None = None,
    extra: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Serve `prompts` through the engine core's client; no detokenizer and no API in the way.

    Returns output tokens/s from the first request sent to the last token received, and the milliseconds between two outputs
    in which every request got a token: the median, and the mean, which a client that falls behind does not distort.
    With `forced` each request answers with that one token, so that two engines compute the same; `extra` goes to plugins.
    """
    core = llm.llm_engine.engine_core
    requests = _requests(prompts, num_output_tokens, label, forced, extra)
    num_open, num_tokens = len(requests), 0
    full_batch_times: list[float] = []
    start = time.perf_counter()
    for request in requests:
        core.add_request(request)
    while num_open:
        outputs = core.get_output().outputs
        for output in outputs:
            num_tokens += len(output.new_token_ids)
            num_open -= output.finished
        if len(outputs) == len(requests):
            full_batch_times.append(time.perf_counter())
    elapsed_s = time.perf_counter() - start
    if num_tokens != len(requests) * num_output_tokens:
        raise RuntimeError(f"{label}: {num_tokens} tokens instead of {len(requests) * num_output_tokens}")
    gaps_ms = [(b - a) * 1e3 for a, b in itertools.pairwise(full_batch_times)]
    return {
        "tokens_per_s": num_tokens / elapsed_s,
        "elapsed_s": elapsed_s,
        "step_p50_ms": statistics.median(gaps_ms) if gaps_ms else float("nan"),
        "step_mean_ms": statistics.fmean(gaps_ms) if gaps_ms else float("nan"),
    }


def throughput(llm: Any, request: dict[str, Any]) -> dict[str, float]:
    """Measure one batch size once."""
    count, round_number = request["num_requests"], request["round"]
    prompts = batch_of_prompts(round_number, count, request["prompt_tokens"])
    return serve_batch(llm, prompts, request["output_tokens"], f"t{round_number}n{count}")


def frontend(llm: Any, request: dict[str, Any]) -> dict[str, float]:
    """Measure the same batch through `LLM.generate`: with the front end's output processing, no detokenizer."""
    from vllm import SamplingParams

    prompts = batch_of_prompts(request["round"], request["num_requests"], request["prompt_tokens"])
    sampling = SamplingParams(temperature=0.0, max_tokens=request["output_tokens"], ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    elapsed_s = time.perf_counter() - start
    num_tokens = sum(len(result.outputs[0].token_ids) for result in results)
    return {"tokens_per_s": num_tokens / elapsed_s, "elapsed_s": elapsed_s}


class StepProfile:
    """Wall time of the parts of a step of an in-process engine core; parts of a step are never nested."""

    PARTS = ("schedule", "execute_model", "sample_tokens", "update_from_output")

    def __init__(self, engine_core: Any) -> None:
        self._rows: list[dict[str, float]] = []
        self._row: dict[str, float] = defaultdict(float)
        self._num_scheduled = (0, 0)
        scheduler, executor = engine_core.scheduler, engine_core.model_executor
        self._time(scheduler, "schedule", self._note_schedule)
        self._time(scheduler, "update_from_output")
        self._time(executor, "execute_model")
        self._time(executor, "sample_tokens")
        step = engine_core.step_fn

        def timed_step() -> Any:
            self._row = defaultdict(float)
            self._num_scheduled = (0, 0)
            start = time.perf_counter()
            try:
                return step()
            finally:
                self._row["start"] = start
                self._row["step"] = time.perf_counter() - start
                self._row["requests"], self._row["tokens"] = self._num_scheduled
                self._rows.append(self._row)

        engine_core.step_fn = timed_step

    def _time(self, owner: Any, name: str, note: Callable[[Any], None] | None = None) -> None:
        call = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = call(*arguments, **options)
            self._row[name] += time.perf_counter() - start
            if note is not None:
                note(result)
            return result

        setattr(owner, name, timed)

    def _note_schedule(self, output: Any) -> None:
        self._num_scheduled = (len(output.num_scheduled_tokens), output.total_num_scheduled_tokens)

    def clear(self) -> None:
        """Forget the steps so far."""
        self._rows.clear()

    def decode_steps(self, num_requests: int) -> dict[str, float]:
        """Return median milliseconds of steps in which all `num_requests` requests decode one token each."""
        rows = self._rows
        chosen = [i for i, row in enumerate(rows) if row["requests"] == row["tokens"] == num_requests]
        if len(chosen) < 3:
            raise RuntimeError(f"only {len(chosen)} steps decode {num_requests} requests")
        result = {part: statistics.median(rows[i][part] for i in chosen) * 1e3 for part in (*self.PARTS, "step")}
        pairs = [(a, b) for a, b in itertools.pairwise(chosen) if b == a + 1]
        result["whole_step"] = statistics.median(rows[b]["start"] - rows[a]["start"] for a, b in pairs) * 1e3
        result["rest"] = result["whole_step"] - sum(result[part] for part in self.PARTS)
        result["num_steps"] = len(chosen)
        return result


def profile(llm: Any, request: dict[str, Any]) -> dict[str, float]:
    """Profile the decode steps of one batch size; `rest` is waiting for the GPU, outputs and the loop itself."""
    core = llm.llm_engine.engine_core.engine_core
    steps = getattr(core, "benchmark_profile", None)
    if steps is None:
        steps = core.benchmark_profile = StepProfile(core)
    steps.clear()
    served = throughput(llm, request)
    result: dict[str, float] = steps.decode_steps(request["num_requests"])
    return {**result, "tokens_per_s": served["tokens_per_s"]}


def greedy_tokens(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return the greedy tokens of mixed prompts, with the best log-probabilities (two, or `num_best`) at every position."""
    prompts = mixed_prompts(request["num_requests"], request["max_prompt_tokens"])
    start = time.perf_counter()
    answers = greedy_answers(llm, prompts, request["output_tokens"], request.get("num_best", 2))
    return {"answers": answers, "elapsed_s": time.perf_counter() - start}


def greedy_answers(llm: Any, prompts: list[list[int]], num_output_tokens: int, num_best: int) -> list[dict[str, Any]]:
    """Return `tokens` of every prompt's answer, and at every position the `best` tokens with their log-probabilities."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True, logprobs=num_best, detokenize=False
    )
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    answers = []
    for result in results:
        output = result.outputs[0]
        ranked = (sorted(position.items(), key=lambda item: item[1].rank) for position in output.logprobs)
        best = [[[token, entry.logprob] for token, entry in position[:num_best]] for position in ranked]
        answers.append({"tokens": list(output.token_ids), "best": best})
    return answers


COMMANDS: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "throughput": throughput,
    "frontend": frontend,
    "profile": profile,
    "tokens": greedy_tokens,
}
