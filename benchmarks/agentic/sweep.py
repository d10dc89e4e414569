# SPDX-License-Identifier: Apache-2.0
"""Many simulations: every tuning of every system under every load, and the best of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.agentic.bound import Bound
from benchmarks.agentic.records import TurnRecord, Window
from benchmarks.agentic.shaping import Shape, open_trace
from benchmarks.agentic.step_time import StepTimeModel
from benchmarks.control.systems import load_factory

STOCK_BUDGETS = (256, 512, 1024, 2048, 8192)
STOCK_SEQS = (32, 40, 48, 56, 64, 256)
STOCK_LONG_PREFILL = (0, 256)


@dataclass(frozen=True)
class Tuning:
    """A system with the settings that operators turn."""

    system: str
    budget_tokens: int = 8192
    max_num_seqs: int = 256
    long_prefill_tokens: int = 0
    target_tps: float = 0.0
    knows_graphs: bool = True

    @property
    def name(self) -> str:
        """The settings in few words."""
        parts = [f"tokens {self.budget_tokens}", f"seqs {self.max_num_seqs}"]
        parts += [f"long {self.long_prefill_tokens}"] if self.long_prefill_tokens else []
        parts += [f"target {self.target_tps:g}"] if self.target_tps else []
        parts += [] if self.knows_graphs else ["graphs unknown"]
        return f"{self.system}: {', '.join(parts)}"


@dataclass(frozen=True)
class Point:
    """A tuning under a load of so many sessions, on a host that takes `host_factor` times as long as the step model says."""

    tuning: Tuning
    num_sessions: int
    host_factor: float = 1.0


@dataclass
class PointResult:
    """Figures of a point, and its turns."""

    point: Point
    figures: dict[str, Any]
    records: list[TurnRecord]
    window: Window
    bound: Bound | None = None
    """What no schedule of the point's work could exceed."""


@dataclass(frozen=True)
class SweepOptions:
    """What all points of a sweep have in common."""

    trace: str
    shape: Shape
    step_model: Path
    pool_tokens: int
    block_tokens: int = 64
    seconds: float = 60.0
    warm_s: float = 15.0
    target_tps: float = 70.0
    real_device_factor: float = 1.0


def stock_tunings(
    budgets: Sequence[int] = STOCK_BUDGETS,
    seqs: Sequence[int] = STOCK_SEQS,
    long_prefill: Sequence[int] = STOCK_LONG_PREFILL,
) -> list[Tuning]:
    """Return what an operator of stock vLLM would try; a limit for long prompts only below the step's budget."""
    return [
        Tuning("stock", budget, max_num_seqs, limit)
        for budget, max_num_seqs, limit in product(budgets, seqs, long_prefill)
        if limit < budget
    ]


def run_point(options: SweepOptions, point: Point) -> PointResult:
    """Simulate one point; the trace and its random choices depend on the load alone, not on the system."""
    from benchmarks.agentic.simulated_engine import EngineSettings
    from benchmarks.agentic.simulation import Simulation, SimulationOptions

    tuning = point.tuning
    trace = open_trace(options.trace, replace(options.shape, num_sessions=point.num_sessions))
    settings = EngineSettings(
        tuning.system,
        num_blocks=options.pool_tokens // options.block_tokens,
        block_tokens=options.block_tokens,
        max_num_seqs=tuning.max_num_seqs,
        budget_tokens=tuning.budget_tokens,
        long_prefill_tokens=tuning.long_prefill_tokens,
        target_tps=tuning.target_tps,
        knows_graphs=tuning.knows_graphs,
    )
    times = StepTimeModel.load(options.step_model, tuning.system)
    times = times.scaled(options.real_device_factor).on_host(point.host_factor)
    wanted = SimulationOptions(options.seconds, options.warm_s, options.target_tps)
    result = Simulation(trace, settings, times, wanted).run()
    return PointResult(point, result.figures(), result.records, result.window, result.bound())


def run_points(
    options: SweepOptions,
    points: Iterable[Point],
    num_processes: int,
    note: Callable[[PointResult], None] = lambda _: None,
) -> Iterator[PointResult]:
    """Simulate all points, in processes forked from one that has imported vLLM."""
    _import_host()
    context = get_context("fork")
    with ProcessPoolExecutor(num_processes, mp_context=context, max_tasks_per_child=None) as pool:
        for result in pool.map(run_point, *zip(*((options, point) for point in points), strict=True)):
            note(result)
            yield result


def _import_host() -> None:
    """Import vLLM with the plugin's general part loaded, as an engine core does; the scheduler class decides."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    load_factory("ours")


def best(results: Iterable[PointResult], system: str, target_tps: float) -> PointResult | None:
    """Return the point of `system` with the most goodput among those where 95% of turns reach the target."""
    meeting = [
        r
        for r in results
        if r.point.tuning.system == system and r.point.tuning.knows_graphs and r.figures["tps_p5"] >= target_tps
    ]
    return max(meeting, key=lambda r: float(r.figures["goodput_per_gpu"]), default=None)


def most_promising(results: Iterable[PointResult], target_tps: float, count: int) -> list[Tuning]:
    """Return the tunings with the most goodput at any load, those that keep the target for 95% of turns first."""
    scores: dict[Tuning, tuple[bool, float]] = {}
    for result in results:
        score = result.figures["tps_p5"] >= target_tps, float(result.figures["goodput_per_gpu"])
        scores[result.point.tuning] = max(score, scores.get(result.point.tuning, score))
    return sorted(scores, key=lambda tuning: scores[tuning], reverse=True)[:count]
