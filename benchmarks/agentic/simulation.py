# SPDX-License-Identifier: Apache-2.0
"""A trace's sessions, closed loop, on a simulated engine."""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.agentic.records import TurnRecord, Window, figures
from benchmarks.agentic.simulated_engine import Emission, EngineSettings, SimulatedEngine
from benchmarks.agentic.step_time import StepTimeModel
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
    elapsed_s: float = 0.0
    engine: dict[str, Any] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """Return the figures of the turns that count, and of the engine."""
        return {**figures(self.records, self.window, self.target_tps), **self.engine}


@dataclass
class _Live:
    record: TurnRecord
    session: Session


class Simulation:
    """Plays sessions on one engine until the virtual clock reaches the end."""

    def __init__(self, trace: Trace, settings: EngineSettings, times: StepTimeModel, options: SimulationOptions):
        self.engine = SimulatedEngine(settings, times)
        self._settings = settings
        self._options = options
        self._records: list[TurnRecord] = []
        self._live: dict[str, _Live] = {}
        self._due: list[tuple[float, int, Session, int]] = []
        self._num_sent = 0
        self._begin_s = 0.0
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
        result.engine = {
            "steps": engine.num_steps - num_steps,
            "preemptions": engine.num_preemptions,
            "device_busy": (engine.device_s - device_s) / simulated_s,
            "unfinished": len(self._live),
            "simulated_s": simulated_s,
            "elapsed_s": elapsed_s,
            "times_real_time": simulated_s / max(elapsed_s, 1e-9),
        }
        return result

    def _result(self, elapsed_s: float) -> SimulationResult:
        options, engine = self._options, self.engine
        unfinished = [live.record for live in self._live.values()]
        begin_s = self._begin_s + options.warm_s
        window = Window(begin_s, max(min(self._begin_s + options.seconds, engine.now_s), begin_s + 1e-9))
        # A turn that waits or streams at the end counts with what it has; one without a token is known to be late.
        for record in unfinished:
            if record.first_s < 0:
                record.first_s = record.last_s = engine.now_s
        return SimulationResult(self._settings, [*self._records, *unfinished], window, options.target_tps, elapsed_s)

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
        if emission.finished:
            del self._live[emission.request_id]
            self._records.append(record)
            if record.turn + 1 < len(live.session.turns):
                following = live.session.turns[record.turn + 1]
                self._schedule(now_s + following.gap_s, live.session, record.turn + 1)
