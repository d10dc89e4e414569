# SPDX-License-Identifier: Apache-2.0
"""Times of steps of known shapes, and of turns that come back to a long history, at the engine core's client.

Runs inside an engine process of `benchmarks.gpu`, as its commands ``step_shapes``, ``reference_steps`` and ``returning_turns``.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.agentic.engine_replay import request_of, set_limits
from benchmarks.gpu.workload import random_prompt

_NEW_TOKENS, _OUTPUT_TOKENS, _NUM_TURNS = 256, 64, 5
_NUM_STEPS, _NUM_REPS = 12, 4
_NO_RATE = {"target_tps_per_user": 0}  # chunks are not cut for the sake of those who decode


def returning_turns(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return the median TTFT and TPOT of turns of one session, nobody else being there.

    Each turn's prompt is the one before, its answer's length in other tokens, and 256 new ones, as when a tool answers.
    `round` makes all contents new, so `cold_ttft_ms`, of the history itself, is that of a prompt that nobody knew.
    """
    core, label, stream = llm.llm_engine.engine_core, request["label"], 900_000 + 1000 * request["round"]
    prompt = random_prompt(stream, request["history"])
    cold = _turn(core, f"{label}-cold", prompt, 2)
    turns = []
    for turn in range(_NUM_TURNS):
        prompt = prompt + random_prompt(stream + 1 + turn, _NEW_TOKENS + (_OUTPUT_TOKENS if turn else 0))
        turns.append(_turn(core, f"{label}-{turn}", prompt, _OUTPUT_TOKENS))
        time.sleep(0.05)  # the engine is idle when a turn comes back
    return {
        "ttft_ms": statistics.median(turn.ttft_ms for turn in turns),
        "tpot_ms": statistics.median(turn.tpot_ms for turn in turns),
        "cold_ttft_ms": cold.ttft_ms,
        "history_tokens": request["history"],
        "all_ttft_ms": [turn.ttft_ms for turn in turns],
        "all_tpot_ms": [turn.tpot_ms for turn in turns],
        "all_gaps_ms": [turn.gaps_ms for turn in turns],
    }


@dataclass(frozen=True)
class _Turn:
    ttft_ms: float
    tpot_ms: float
    gaps_ms: list[float]
    """Between two tokens each, so that a slow turn shows whether all steps were slow or a few."""


def _turn(core: Any, request_id: str, prompt: list[int], num_output: int) -> _Turn:
    start = time.perf_counter()
    core.add_request(request_of(request_id, prompt, num_output))
    times: list[float] = []
    finished = False
    while not finished:
        for output in core.get_output().outputs:
            if output.request_id == request_id:
                times += [time.perf_counter()] * bool(output.new_token_ids)
                finished = bool(output.finished)
    gaps_ms = [round((after - before) * 1e3, 3) for before, after in itertools.pairwise(times)]
    return _Turn((times[0] - start) * 1e3, (times[-1] - times[0]) * 1e3 / max(1, num_output - 1), gaps_ms)


def step_shapes(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Measure steps of known shapes; return a row per shape: work and milliseconds.

    `limits` are what stock's scheduler is to keep to from now on: those of a point before would have some of the rows wait for ever.
    """
    core = llm.llm_engine.engine_core
    set_limits(core, f"limits{request['stream']}", request["limits"])
    rows = []
    for number, (num_decodes, context) in enumerate(request["decodes"]):
        rows += _rows_of(core, num_decodes, context, request["prefills"], request["stream"] + number * 1000)
    return {"rows": rows}


def reference_steps(llm: Any, request: dict[str, Any]) -> dict[str, float]:
    """Return the milliseconds of a step in which `rows` requests with a context of `context` tokens decode; `limits` as of `step_shapes`."""
    core, stream = llm.llm_engine.engine_core, request["stream"]
    set_limits(core, f"limits{stream}", request["limits"])
    return {"ms": _rows_of(core, request["rows"], request["context"], [], stream)[0]["ms"]}


def _rows_of(
    core: Any, num_decodes: int, context: int, prefills: list[list[int]], stream: int
) -> list[dict[str, float]]:
    """Measure decodes alone, then each prompt `[tokens cached, tokens new]` beside them."""
    for index in range(num_decodes):
        core.add_request(request_of(f"d{stream}-{index}", random_prompt(stream + index, context), 4000, _NO_RATE))
    clock = _StepClock(core, f"d{stream}-", num_decodes)
    clock.wait_until_all_decode()
    decode_ms = statistics.median(clock.span_ms(_NUM_STEPS) for _ in range(_NUM_REPS)) / _NUM_STEPS
    context_tokens = num_decodes * (context + clock.num_steps)
    rows = [{"decodes": num_decodes, "context": context_tokens, "prefill": 0, "pairs": 0, "ms": decode_ms}]
    for number, (begin, new) in enumerate(prefills if num_decodes else []):
        label = f"{stream}-{begin}-{new}"
        prompts = [random_prompt(stream + 600 + 10 * number + rep, begin + new) for rep in range(_NUM_REPS)]
        extra_ms = statistics.median(clock.extra_ms(f"{label}-{rep}", prompts[rep], begin) for rep in range(_NUM_REPS))
        pairs, ms = new * (begin + new / 2), decode_ms + extra_ms
        context_tokens = num_decodes * (context + clock.num_steps)
        rows.append({"decodes": num_decodes, "context": context_tokens, "prefill": new, "pairs": pairs, "ms": ms})
    core.abort_requests([f"d{stream}-{index}" for index in range(num_decodes)])
    time.sleep(0.2)
    return rows


class _StepClock:
    """Times between steps in which all decodes of a label got a token."""

    def __init__(self, core: Any, label: str, num_decodes: int) -> None:
        self.num_steps = 0
        self._core = core
        self._label = label
        self._num_decodes = num_decodes
        self._last_s = 0.0

    def wait_until_all_decode(self) -> None:
        while self._next() < self._num_decodes:
            pass
        self.span_ms(10)

    def span_ms(self, count: int) -> float:
        """Return the milliseconds of the next `count` steps, from the end of the last one that was seen."""
        begin_s = self._last_s
        for _ in range(count):
            while self._next() < self._num_decodes:
                pass
        return (self._last_s - begin_s) * 1e3

    def extra_ms(self, label: str, prompt: list[int], num_cached: int) -> float:
        """Return the milliseconds that a prompt adds whose first `num_cached` tokens were computed shortly before."""
        if num_cached:
            self._core.add_request(request_of(f"w{label}", prompt[:num_cached], 1, _NO_RATE))
            self.span_ms(2 * _NUM_STEPS)
        alone_ms = self.span_ms(_NUM_STEPS)
        self._core.add_request(request_of(f"p{label}", prompt, 1, _NO_RATE))
        return self.span_ms(_NUM_STEPS) - alone_ms

    def _next(self) -> int:
        outputs = self._core.get_output().outputs
        num_rows = sum(output.request_id.startswith(self._label) for output in outputs)
        if num_rows >= self._num_decodes:
            self.num_steps += 1
            self._last_s = time.perf_counter()
        return num_rows
