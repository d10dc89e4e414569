# SPDX-License-Identifier: Apache-2.0
"""Times of steps of known shapes, and of turns that come back to a long history, at the engine core's client.

Runs inside an engine process of `benchmarks.gpu`, as its commands ``step_shapes`` and ``returning_turns``.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

from benchmarks.agentic.engine_replay import request_of, serve
from benchmarks.gpu.workload import random_prompt

_NEW_TOKENS, _OUTPUT_TOKENS, _NUM_TURNS = 256, 64, 7


def returning_turns(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return the median TTFT and TPOT of turns of one session, nobody else being there.

    Each turn's prompt is the one before, its answer's length in other tokens, and 256 new ones, as when a tool answers.
    """
    core, label = llm.llm_engine.engine_core, request["label"]
    prompt = random_prompt(900_000, request["history"])
    serve(core, [prompt], 1, f"{label}-first")
    ttft_ms: list[float] = []
    tpot_ms: list[float] = []
    for turn in range(_NUM_TURNS):
        prompt = prompt + random_prompt(900_001 + turn, _NEW_TOKENS + (_OUTPUT_TOKENS if turn else 0))
        start = time.perf_counter()
        core.add_request(request_of(f"{label}-{turn}", prompt, _OUTPUT_TOKENS))
        times = []
        finished = False
        while not finished:
            for output in core.get_output().outputs:
                if output.new_token_ids:
                    times.append(time.perf_counter())
                finished = finished or bool(output.finished)
        ttft_ms.append((times[0] - start) * 1e3)
        tpot_ms.append((times[-1] - times[0]) * 1e3 / (_OUTPUT_TOKENS - 1))
        time.sleep(0.05)  # the engine is idle when a turn comes back
    return {
        "ttft_ms": statistics.median(ttft_ms),
        "tpot_ms": statistics.median(tpot_ms),
        "history_tokens": request["history"],
        "all_ttft_ms": ttft_ms,
        "all_tpot_ms": tpot_ms,
    }


def step_shapes(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Measure steps of known shapes; return a row per shape: work and milliseconds."""
    core = llm.llm_engine.engine_core
    rows = []
    for number, (num_decodes, context) in enumerate(request["decodes"]):
        rows += _rows_of(core, num_decodes, context, request["prefills"], 10_000 + number * 1000)
    return {"rows": rows}


def _rows_of(
    core: Any, num_decodes: int, context: int, prefills: list[list[int]], stream: int
) -> list[dict[str, float]]:
    """Measure decodes alone, then each prompt `[tokens cached, tokens new]` beside them."""
    for index in range(num_decodes):
        core.add_request(request_of(f"d{stream}-{index}", random_prompt(stream + index, context), 4000))
    clock = _StepClock(core, f"d{stream}-", num_decodes)
    clock.wait_until_all_decode()
    decode_ms = statistics.median(clock.gaps_ms(40))
    context_tokens = num_decodes * (context + clock.num_steps)
    rows = [{"decodes": num_decodes, "context": context_tokens, "prefill": 0, "pairs": 0, "ms": decode_ms}]
    for begin, new in prefills if num_decodes else []:
        extra = []
        for rep in range(3):
            prompt = (
                random_prompt(stream + 500 + rep, begin + new)
                if begin
                else random_prompt(stream + 600 + rep + new, new)
            )
            if begin:
                core.add_request(request_of(f"w{stream}-{begin}-{new}-{rep}", prompt[:begin], 1))
                clock.gaps_ms(25)
            core.add_request(request_of(f"p{stream}-{begin}-{new}-{rep}", prompt, 1))
            gaps = clock.gaps_ms(12)
            extra.append(sum(gaps) - len(gaps) * decode_ms)
        pairs = new * (begin + new / 2)
        ms = decode_ms + statistics.median(extra)
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

    def wait_until_all_decode(self) -> None:
        while self._next() < self._num_decodes:
            pass
        self.gaps_ms(10)

    def gaps_ms(self, count: int) -> list[float]:
        """Return the milliseconds between the next `count` steps."""
        times = [time.perf_counter()]
        while len(times) <= count:
            if self._next() >= self._num_decodes:
                times.append(time.perf_counter())
        return [(after - before) * 1e3 for before, after in itertools.pairwise(times)]

    def _next(self) -> int:
        outputs = self._core.get_output().outputs
        self.num_steps += 1
        return sum(output.request_id.startswith(self._label) for output in outputs)
