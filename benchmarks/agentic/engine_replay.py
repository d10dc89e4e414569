# SPDX-License-Identifier: Apache-2.0
"""A trace's sessions, closed loop, at the engine core's client: no HTTP server and no tokenizer in the way.

Runs inside an engine process of `benchmarks.gpu`, as its command ``sessions``.
"""

from __future__ import annotations

import heapq
import time
from typing import Any

import msgspec

from benchmarks.agentic.records import CUT, TurnRecord
from benchmarks.agentic.shaping import Shape, open_trace
from benchmarks.agentic.stock_limits import TUNING_KEY
from benchmarks.agentic.trace import Session

FIRST_TOKEN, NUM_TOKEN_KINDS = 300, 7800  # of the benchmark's tokenizer: past special tokens and single bytes


class EngineReplay:
    """Sessions on one engine, until the time is over; `extra_args` are what every turn asks for, as of `request_of`."""

    def __init__(
        self, core: Any, sessions: tuple[Session, ...], label: str, extra_args: dict[str, Any] | None = None
    ) -> None:
        self.records: list[TurnRecord] = []
        self.steps: list[tuple[float, int, int]] = []
        """Of every step: when its tokens came, how many requests got one, and for how many it was the first."""
        self._core = core
        self._label = label
        self._extra_args = extra_args
        self._sessions = sessions
        self._begin_s = time.perf_counter()
        self._due: list[tuple[float, int, Session, int]] = []
        self._live: dict[str, tuple[TurnRecord, Session]] = {}
        self._num_sent = 0

    def fill_cache(self) -> None:
        """Compute every session's first prompt, so that the cache holds what it would hold in a server that ran for long."""
        prompts = [session.turns[0].prompt.token_ids(FIRST_TOKEN, NUM_TOKEN_KINDS) for session in self._sessions]
        serve(self._core, prompts, 1, f"{self._label}-fill")

    def run(self, seconds: float) -> None:
        """Play; turns under way at the end are cut and aborted."""
        self._begin_s = time.perf_counter()
        for session in self._sessions:
            self._schedule(session.start_s, session, 0)
        while (now_s := self._now_s()) < seconds:
            self._send_due(now_s)
            if self._live:
                self._take_outputs()
            elif not self._due:
                break
            else:
                time.sleep(max(0.0, min(self._due[0][0], seconds) - now_s))
        self._cut()

    def _now_s(self) -> float:
        return time.perf_counter() - self._begin_s

    def _schedule(self, at_s: float, session: Session, turn: int) -> None:
        self._num_sent += 1
        heapq.heappush(self._due, (at_s, self._num_sent, session, turn))

    def _send_due(self, now_s: float) -> None:
        while self._due and self._due[0][0] <= now_s:
            _, _, session, number = heapq.heappop(self._due)
            turn = session.turns[number]
            prompt = turn.prompt.token_ids(FIRST_TOKEN, NUM_TOKEN_KINDS)
            request_id = f"{self._label}/{session.name}/{number}"
            record = TurnRecord(session.name, number, self._now_s(), -1.0, -1.0, len(prompt), 0)
            self._live[request_id] = record, session
            self._core.add_request(request_of(request_id, prompt, turn.output_tokens, self._extra_args))

    def _take_outputs(self) -> None:
        outputs = self._core.get_output().outputs
        now_s = self._now_s()
        num_rows = num_first = 0
        for output in outputs:
            if output.request_id not in self._live:
                continue
            record = self._live[output.request_id][0]
            stats = getattr(output, "prefill_stats", None)
            if stats is not None and record.cached_tokens < 0:
                record.cached_tokens = int(getattr(stats, "num_cached_tokens", -1))
            if output.new_token_ids:
                num_rows += 1
                if record.output_tokens:
                    record.longest_gap_s = max(record.longest_gap_s, now_s - record.last_s)
                else:
                    record.first_s = now_s
                    num_first += 1
                record.last_s = now_s
                record.output_tokens += len(output.new_token_ids)
            if output.finished:
                self._end(output.request_id, now_s)
        self.steps.append((now_s, num_rows, num_first))

    def _end(self, request_id: str, now_s: float) -> None:
        record, session = self._live.pop(request_id)
        self.records.append(record)
        if record.turn + 1 < len(session.turns):
            self._schedule(now_s + session.turns[record.turn + 1].gap_s, session, record.turn + 1)

    def _cut(self) -> None:
        now_s = self._now_s()
        for record, _ in self._live.values():
            record.error = CUT
            if record.first_s < 0:
                record.first_s = record.last_s = now_s
            self.records.append(record)
        if self._live:
            self._core.abort_requests(list(self._live))
        self._live.clear()


def request_of(request_id: str, prompt: list[int], max_tokens: int, extra_args: dict[str, Any] | None = None) -> Any:
    """Return a request that emits exactly `max_tokens` tokens; `extra_args` are what a client's `vllm_xargs` become."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra_args
        ),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def serve(core: Any, prompts: list[list[int]], max_tokens: int, label: str) -> None:
    """Serve prompts to their end."""
    for index, prompt in enumerate(prompts):
        core.add_request(request_of(f"{label}-{index}", prompt, max_tokens))
    wait_for(core, label, len(prompts))


def wait_for(core: Any, label: str, num_open: int) -> None:
    """Take outputs until so many requests have ended whose ids begin with `label`."""
    while num_open > 0:
        num_open -= sum(bool(o.finished) and o.request_id.startswith(label) for o in core.get_output().outputs)


def forget_prefixes(core: Any, patience_s: float = 3.0) -> bool:
    """Empty the prefix cache, so that a point does not profit from the one before; return False when blocks stay in use."""
    deadline_s = time.perf_counter() + patience_s
    while not core.reset_prefix_cache():
        if time.perf_counter() > deadline_s:
            return False
        time.sleep(0.05)  # requests that were aborted give their blocks back with the next step
    return True


def sessions(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Play the trace of `request` in its shape; return a record per turn, and when each step's tokens came.

    `limits` are what stock's scheduler is to keep to, as of `StockLimits`, once the cache is filled within `fill_limits`;
    None leaves a scheduler as it is. `rate` is what every turn asks for, in tokens/s; without it they say nothing.
    """
    core, label = llm.llm_engine.engine_core, request["label"]
    begin_s = time.perf_counter()
    set_limits(core, f"{label}-fill-limits", request["fill_limits"])
    was_emptied = forget_prefixes(core)
    trace = open_trace(request["trace"], Shape(**request["shape"]))
    asked = {"target_tps_per_user": request["rate"]} if request.get("rate") else None
    replay = EngineReplay(core, trace.sessions, label, asked)
    replay.fill_cache()
    set_limits(core, f"{label}-limits", request["limits"])
    fill_s = time.perf_counter() - begin_s
    replay.run(request["seconds"])
    return {
        "records": msgspec.to_builtins(replay.records),
        "steps": replay.steps,
        "trace": trace.describe(),
        "fill_s": fill_s,
        "began_empty": was_emptied,
    }


def set_limits(core: Any, request_id: str, limits: dict[str, int] | None) -> None:
    """Have a tunable scheduler keep to `limits`, as of `StockLimits`; None leaves it as it is."""
    if limits is not None:
        core.add_request(request_of(request_id, [FIRST_TOKEN] * 2, 1, {TUNING_KEY: limits}))
        wait_for(core, request_id, 1)
