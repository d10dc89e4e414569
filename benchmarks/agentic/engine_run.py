# SPDX-License-Identifier: Apache-2.0
"""The phases of `engines`: what is measured, in which order, and what is left out when time is short."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from benchmarks.agentic.known_steps import Ask, KnownSteps, Reference, mean_reference
from benchmarks.agentic.measured_run import point_label
from benchmarks.agentic.options import shape_of
from benchmarks.agentic.records import TurnRecord, Window, figures, goodput_at, write_records
from benchmarks.agentic.shaping import open_trace
from benchmarks.agentic.stock_limits import StockLimits
from benchmarks.agentic.stock_search import StockSearch
from benchmarks.gpu.engine import EngineOptions
from benchmarks.gpu.engine_client import EngineFailedError, EngineProcess, engines
from benchmarks.gpu.models import MODELS, TINY_MODELS, write_model

_TUNABLE_STOCK = "benchmarks.agentic.tunable_stock.TunableScheduler"
_SHORT_HISTORY, _NUM_ROUNDS = 1024, 4
_SHAPES_S, _ALONE_S, _REFERENCE_S = 45.0, 30.0, 4.0  # what they take at most, as far as is known
_LEAST_FILL_S, _CLOSING_S = 4.0, 6.0

_Phase = Callable[[], dict[str, Any] | None]
"""Measures something and returns the figures; None where there was no time for it, or nothing to measure."""


class EngineRun:
    """A run with its deadline: the most telling figures first, and everything is written as it comes.

    Ours and untuned stock come first, under the first load, then ours with more rates that requests ask for, steps of known shapes, one
    session alone, two tries of stock's limits, one for each further target, the other loads, and more tries. Where the search of stock's
    limits begins elsewhere, its second try, stock as it was started and the tries for further targets come before the shapes. Between any
    two of these stand steps of one shape, which say how fast the host is.
    """

    def __init__(self, options: argparse.Namespace, save: Callable[[EngineRun], None]) -> None:
        self.figures: dict[str, dict[str, Any]] = {}
        self.shapes: dict[str, Any] = {}
        self.alone: dict[str, dict[str, Any]] = {}
        self.engines: dict[str, dict[str, Any]] = {}
        self.references: list[dict[str, float]] = []
        """What a step of one shape took, by system, and when: between any two phases."""
        self._options = options
        self._save = save
        self._begin_s = time.monotonic()
        self._deadline = self._begin_s + options.total_seconds
        self._fill_s = _LEAST_FILL_S
        self._start = StockLimits(options.stock_seqs, max(options.most_budget, options.stock_seqs))
        begin = StockLimits(*options.first_limits) if options.first_limits else self._start
        self._search = StockSearch(options.target, self._start, options.budget, begin)

    def run(self, folder: Path) -> None:
        """Build both engines and measure. Raises TraceError at once for a trace that is not there."""
        open_trace(self._options.trace, shape_of(self._options, 1, ramp_s=1.0))
        environment = {"TOKENSPEED_TARGET_TPS_PER_USER": f"{self._options.target:g}"}
        with engines(self._entries(folder), folder, self._left_s(), environment) as running:
            self.engines = {system: engine.description for system, engine in running.items()}
            print(f"built: {self.engines}", file=sys.stderr, flush=True)
            self._save(self)
            known = KnownSteps(self._options, self.engines, self._start)
            before = self._reference(known, running)
            for phase in self._phases(running, known):
                measured = phase()
                if measured is not None:
                    after = self._reference(known, running)
                    measured["reference_ms"] = mean_reference([before, after])
                    before = after
                self._save(self)

    def _entries(self, folder: Path) -> list[EngineOptions]:
        options = self._options
        model = (TINY_MODELS if options.tiny else MODELS)[options.model]
        common = {
            "model_folder": str(write_model(model, folder)),
            "kv_cache_bytes": int(options.kv_gib * (1 << 30)),
            "device": options.device,
            "max_model_tokens": options.max_model_len,
            "budget_tokens": max(options.most_budget, options.stock_seqs, options.max_num_seqs),
        }
        return [
            EngineOptions(
                "stock",
                max_requests=options.stock_seqs,
                llm_settings={"scheduler_cls": _TUNABLE_STOCK},
                **common,
            ),
            EngineOptions("ours", max_requests=options.max_num_seqs, **common),
        ]

    def _phases(self, running: dict[str, EngineProcess], known: KnownSteps) -> list[_Phase]:
        first, *others = self._options.loads

        def ours(load: int, rate: float = 0.0) -> _Phase:
            return lambda: self._play("ours", running["ours"], load, rate=rate)

        def stock(load: int, limits: StockLimits | None = None) -> _Phase:
            return lambda: self._play("stock", running["stock"], load, limits or self._search.best())

        def tuned(search: StockSearch) -> _Phase:
            def play() -> dict[str, Any] | None:
                limits = search.next()
                return None if limits is None else self._play("stock", running["stock"], first, limits)

            return play

        tune = tuned(self._search)
        # What was tried for one target says where to go on for another.
        also = [tuned(replace(self._search, target_tps=target)) for target in self._options.also_targets]

        rate, *rates = self._options.rates
        phases: list[_Phase] = [ours(first, rate), tune, *(ours(first, rate) for rate in rates)]
        phases += [tune, stock(first, self._start), *also] if self._options.first_limits else []
        phases += [] if self._options.no_shapes else [lambda: self._measure_shapes(running, known)]
        phases += [lambda: self._measure_alone(running), tune, tune]
        phases += [] if self._options.first_limits else also
        for load in others:
            phases += [ours(load), stock(load)]
        return [*phases, tune, tune]

    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

    def _has_time(self, seconds: float, what: str) -> bool:
        left_s = self._left_s() - _CLOSING_S
        if left_s < seconds:
            print(f"left out: {what} ({left_s:.0f} s left, {seconds:.0f} needed)", file=sys.stderr, flush=True)
        return left_s >= seconds

    def _ask(self, engine: EngineProcess, command: str, **arguments: Any) -> dict[str, Any]:
        return engine.run(command, timeout_s=self._left_s(), **arguments)

    def _reference(self, known: KnownSteps, running: dict[str, EngineProcess]) -> Reference:
        """Return what a step of one shape takes now; nothing where there is no time for it."""
        if not self._has_time(_REFERENCE_S, "steps that say how fast the host is"):
            return {}
        found = known.reference(self._asking(running), running)
        self.references.append({"at_s": time.monotonic() - self._begin_s, **found})
        return found

    def _asking(self, running: dict[str, EngineProcess]) -> Ask:
        return lambda system, command, **arguments: self._ask(running[system], command, **arguments)

    def _measure_alone(self, running: dict[str, EngineProcess]) -> dict[str, Any] | None:
        """One session whose turns come back to a history, a short and a long one; the systems by turns, and in both orders."""
        options = self._options
        history = min(options.history, options.max_model_len - 4096)
        if history <= 0 or not self._has_time(_ALONE_S, "one session alone"):
            return None
        lengths = sorted({min(_SHORT_HISTORY, history), history})
        found: dict[str, dict[int, list[dict[str, Any]]]] = {system: {} for system in running}
        for number in range(_NUM_ROUNDS):
            for system, engine in list(running.items())[:: -1 if number % 2 else 1]:
                for length in lengths:
                    label = f"alone{number}-{length}"
                    try:
                        one = self._ask(engine, "returning_turns", history=length, round=number, label=label)
                    except EngineFailedError as error:
                        self.alone[system] = {"error": str(error)}
                        continue
                    found[system].setdefault(length, []).append(one)
        for system, by_length in found.items():
            if "error" not in self.alone.get(system, {}) and by_length:
                self.alone[system] = {str(length): _joined(ones) for length, ones in by_length.items()}
        print(f"one session alone: {self.alone}", file=sys.stderr, flush=True)
        return {}

    def _measure_shapes(self, running: dict[str, EngineProcess], known: KnownSteps) -> dict[str, Any] | None:
        if not self._has_time(_SHAPES_S, "steps of known shapes"):
            return None
        start = time.monotonic()
        try:
            self.shapes = known.shapes(self._asking(running), running)
        except EngineFailedError as error:
            self.shapes = {"error": str(error)}
            return self.shapes
        self.shapes["seconds"] = time.monotonic() - start
        print(f"steps of known shapes: {self.shapes}", file=sys.stderr, flush=True)
        return self.shapes

    def _play(
        self, system: str, engine: EngineProcess, load: int, limits: StockLimits | None = None, rate: float = 0.0
    ) -> dict[str, Any] | None:
        """Play one point; return its figures, None where there is no time for it."""
        options = self._options
        tuning = f" seqs {limits.max_num_seqs} tokens {limits.budget_tokens}" if limits else ""
        name = f"{system}{tuning}{f' asked for {rate:g}' if rate else ''}, {load} sessions"
        if not self._has_time(options.seconds + self._fill_s, name):
            return None
        shape = shape_of(options, load, ramp_s=min(3.0, options.warm / 2))
        facts = {"system": system, "num_sessions": load, "asked_tps": rate, **(asdict(limits) if limits else {})}
        label = point_label(facts)
        wanted = {"trace": options.trace, "shape": asdict(shape), "label": label, "seconds": options.seconds}
        try:
            answer = self._ask(
                engine,
                "sessions",
                limits=asdict(limits) if limits else None,
                fill_limits=asdict(self._search.most) if limits else None,
                rate=rate,
                **wanted,
            )
        except EngineFailedError as error:
            self.figures[name] = {"error": str(error)}
            print(f"error: {error}", file=sys.stderr, flush=True)
            return self.figures[name]
        found = self._take_in(facts, label, answer)
        self.figures[name] = found
        if limits and load == options.loads[0]:
            self._search.note(limits, found)
        self._fill_s = max(self._fill_s, answer["fill_s"])
        print(
            f"{name}: p95 {found['tps_p5']:.0f} tokens/s, goodput {found['goodput_per_gpu']:,.0f}, "
            f"{found['rows_mean']:.0f} rows, step {found['step_ms_p50']:.1f} ms, {self._left_s():.0f} s left",
            file=sys.stderr,
            flush=True,
        )
        return found

    def _take_in(self, facts: dict[str, Any], label: str, answer: dict[str, Any]) -> dict[str, Any]:
        """Write a point's turns and return its figures."""
        options = self._options
        records = msgspec.convert(answer["records"], list[TurnRecord])
        window = Window(options.warm, options.seconds)
        if options.out is not None:
            run = {**facts, "target_tps": options.target, "num_gpus": 1, "window": asdict(window)}
            write_records(options.out / f"{label}.jsonl", run, records)
            (options.out / f"{label}.steps.json").write_bytes(msgspec.json.encode(answer["steps"]))
        return {
            **figures(records, window, options.target),
            "goodput_at": goodput_at(records, window, (options.target, *options.also_targets)),
            **_step_figures(answer["steps"], window),
            **facts,
            "fill_s": answer["fill_s"],
            "began_empty": answer["began_empty"],
        }


def _joined(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over the turns of all rounds."""
    joined: dict[str, Any] = {
        name: [value for one in rounds for value in one[name]] for name in ("all_ttft_ms", "all_tpot_ms")
    }
    gaps = [gaps for one in rounds for gaps in one.get("all_gaps_ms", [])]
    joined["all_cold_ttft_ms"] = [one["cold_ttft_ms"] for one in rounds]
    medians = {name.removeprefix("all_"): median(values) for name, values in joined.items()}
    return {**medians, **joined, "all_gaps_ms": gaps}


def _step_figures(steps: list[tuple[float, int, int]], window: Window) -> dict[str, float]:
    """Return the mean number of requests that got a token in a step of the window, and the time between two steps."""
    inside = [step for step in steps if window.begin_s <= step[0] < window.end_s]
    if len(inside) < 2:
        return {"rows_mean": float("nan"), "step_ms_mean": float("nan"), "step_ms_p50": float("nan")}
    gaps_ms = [(after[0] - before[0]) * 1e3 for before, after in itertools.pairwise(inside)]
    return {
        "rows_mean": sum(step[1] for step in inside) / len(inside),
        "step_ms_mean": fmean(gaps_ms),
        "step_ms_p50": median(gaps_ms),
    }
