# SPDX-License-Identifier: Apache-2.0
"""A trace's sessions, closed loop, on a simulated engine."""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.agentic.bound import Bound, StepDone, bound_of_steps
from benchmarks.agentic.records import TurnRecord, Window, figures
from benchmarks.agentic.simulated_engine import Emission, EngineSettings, SimulatedEngine
from benchmarks.agentic.step_time import StepShape, StepTimeModel
from benchmarks.agentic.tpot_bound import JudgedTurn, RunWork, least_p99_tpot_ms
from benchmarks.agentic.trace import Session, Trace

_MOST_IDLE_STEPS = 1000


class StalledError(RuntimeError):
    """A scheduler plans nothing although requests wait."""


@dataclass(frozen=True)
class SimulationOptions:
    """How long to simulate; turns that begin in the first `warm_s` do not count.

    Before the first second every session's first prompt is computed once, so that the cache holds what it would hold in
    a server that has run for long.
    """

    seconds: float = 60.0
    warm_s: float = 15.0
    target_tps: float = 70.0


@dataclass
class SimulationResult:
    """What a simulation saw."""

    settings: EngineSettings
    records: list[TurnRecord]
    window: Window
    target_tps: float
    num_inside: list[int]
    """Of each record, the tokens that came in the window."""
    elapsed_s: float = 0.0
    engine: dict[str, Any] = field(default_factory=dict)
    steps: list[StepDone] = field(default_factory=list)
    fixed_ms: float = 0.0
    least_tpot_ms: float = 0.0
    """Below which no schedule of this work could bring the p99 of the time per token."""

    def figures(self) -> dict[str, Any]:
        """Return the figures of the turns that count, and of the engine.

        Output is counted token by token here, where every one is seen, so that `bound` holds exactly.
        """
        seconds = self.window.end_s - self.window.begin_s
        good = (n for n, record in zip(self.num_inside, self.records, strict=True) if record.tps >= self.target_tps)
        exact = {"tokens_per_s_per_gpu": sum(self.num_inside) / seconds, "goodput_per_gpu": sum(good) / seconds}
        least = {"least_tpot_ms_p99": self.least_tpot_ms}
        return {**figures(self.records, self.window, self.target_tps), **exact, **least, **self.engine}

    def bound(self) -> Bound:
        """Return what no schedule of this work could exceed."""
        return bound_of_steps(self.steps, self.records, self.window, self.fixed_ms, self.target_tps)


@dataclass
class _Live:
    record: TurnRecord
    session: Session
    num_inside: int = 0


class Simulation:
    """Plays sessions on one engine until the virtual clock reaches the end."""

    def __init__(self, trace: Trace, settings: EngineSettings, times: StepTimeModel, options: SimulationOptions):
        self.engine = SimulatedEngine(settings, times)
        self._settings = settings
        self._options = options
        self._ended: list[_Live] = []
        self._live: dict[str, _Live] = {}
        self._due: list[tuple[float, int, Session, int]] = []
        self._num_sent = 0
        self._begin_s = self._count_from_s = 0.0
        self._trace = trace

    def _fill_cache(self) -> float:
        """Compute every session's first prompt; return the time on the virtual clock at the end."""
        for number, session in enumerate(self._trace.sessions):
            self.engine.add(f"fill/{number}", session.turns[0].prompt.token_ids(), 1)
        while not self.engine.is_idle:
            if self.engine.step() is None:
                self.engine.now_s += 1e-3
        return self.engine.now_s

    def run(self) -> SimulationResult:
        """Simulate; raises StalledError when the scheduler stops planning while requests wait."""
        options, engine = self._options, self.engine
        self._begin_s = self._fill_cache()
        self._count_from_s = self._begin_s + options.warm_s
        for session in self._trace.sessions:
            self._schedule(self._begin_s + session.start_s, session, 0)
        started, num_steps, device_s = time.perf_counter(), engine.num_steps, engine.device_s
        num_empty = 0
        while engine.now_s < self._begin_s + options.seconds:
            self._send_due()
            emissions = engine.step()
            if emissions is None:
                num_empty += 1
                if not self._due and engine.is_idle:
                    break
                if num_empty > _MOST_IDLE_STEPS:
                    raise StalledError(
                        f"{self._settings.describe()}: {len(self._live)} requests wait, nothing is planned"
                    )
                next_s = self._due[0][0] if self._due and engine.is_idle else engine.now_s + 1e-3
                engine.now_s = max(engine.now_s, next_s)
                continue
            num_empty = 0
            for emission in emissions:
                self._note(emission)
        elapsed_s, simulated_s = time.perf_counter() - started, engine.now_s - self._begin_s
        result = self._result(elapsed_s)
        result.steps, result.fixed_ms = engine.steps, engine.times.device_ms(StepShape(0, 0, 0, 0))
        result.least_tpot_ms = least_p99_tpot_ms(self._work(result), engine.times)
        result.engine = {
            "steps": engine.num_steps - num_steps,
            "preemptions": engine.num_preemptions,
            "device_busy": (engine.device_s - device_s) / simulated_s,
            "unfinished": len(self._live),
            "model_error": engine.model_error(),
            "simulated_s": simulated_s,
            "elapsed_s": elapsed_s,
            "times_real_time": simulated_s / max(elapsed_s, 1e-9),
        }
        return result

    def _work(self, result: SimulationResult) -> RunWork:
        begin_s, end_s = result.window.begin_s, result.window.end_s
        steps = [step for step in result.steps if begin_s <= step.taken_s < end_s]
        took_ms = steps[-1].end_ms - steps[0].begin_ms if steps else 0.0
        turns = [
            JudgedTurn(record.prompt_tokens, record.output_tokens - 1)
            for record in result.records
            if result.window.rates(record)
        ]
        return RunWork(
            turns,
            max((end_s - begin_s) * 1e3, took_ms),
            sum(step.prompt_ms + step.decode_ms for step in steps),
            self._settings.max_num_seqs,
            2 * self.engine.most_host_ms,
        )

    def _result(self, elapsed_s: float) -> SimulationResult:
        options, engine = self._options, self.engine
        begin_s = self._count_from_s
        # A run that was through early ends just after its last token, which counts.
        window = Window(begin_s, max(min(self._begin_s + options.seconds, engine.now_s + 1e-9), begin_s + 1e-9))
        # A turn that waits or streams at the end counts with what it has; one without a token is known to be late.
        for live in self._live.values():
            if live.record.first_s < 0:
                live.record.first_s = live.record.last_s = engine.now_s
        lives = [*self._ended, *self._live.values()]
        return SimulationResult(
            self._settings,
            [live.record for live in lives],
            window,
            options.target_tps,
            [live.num_inside for live in lives],
            elapsed_s,
        )

    def _schedule(self, at_s: float, session: Session, turn: int) -> None:
        self._num_sent += 1
        heapq.heappush(self._due, (at_s, self._num_sent, session, turn))

    def _send_due(self) -> None:
        while self._due and self._due[0][0] <= self.engine.now_s:
            at_s, _, session, number = heapq.heappop(self._due)
            turn = session.turns[number]
            request_id = f"{session.name}/{number}"
            record = TurnRecord(session.name, number, at_s, -1.0, -1.0, turn.prompt.num_tokens, 0)
            self._live[request_id] = _Live(record, session)
            self.engine.add(request_id, turn.prompt.token_ids(), turn.output_tokens)

    def _note(self, emission: Emission) -> None:
        live, now_s = self._live[emission.request_id], self.engine.now_s
        record = live.record
        record.cached_tokens = emission.cached_tokens
        if emission.num_tokens:
            if record.output_tokens:
                record.longest_gap_s = max(record.longest_gap_s, now_s - record.last_s)
            else:
                record.first_s = now_s
            record.last_s = now_s
            record.output_tokens += emission.num_tokens
            if self._count_from_s <= now_s < self._begin_s + self._options.seconds:
                live.num_inside += emission.num_tokens
        if emission.finished:
            self._ended.append(self._live.pop(emission.request_id))
            if record.turn + 1 < len(live.session.turns):
                following = live.session.turns[record.turn + 1]
                self._schedule(now_s + following.gap_s, live.session, record.turn + 1)
