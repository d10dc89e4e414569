# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.agentic simulate`: systems on a step-time model, the best of each, and the bound."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.agentic.bound import Bound, upper_bound
from benchmarks.agentic.options import add_shape_options, shape_of
from benchmarks.agentic.records import write_records
from benchmarks.agentic.shaping import open_trace
from benchmarks.agentic.step_time import H200_DENSE_1B, StepTimeModel
from benchmarks.agentic.sweep import (
    STOCK_SEQS,
    Point,
    PointResult,
    SweepOptions,
    Tuning,
    best,
    run_points,
    stock_tunings,
)
from benchmarks.report import (
    Bar,
    MissingFigureError,
    Outcome,
    console,
    exit_code,
    print_outcomes,
    print_table,
    write_json,
)

_GOODPUT_RATIO = {70.0: 1.3, 100.0: 1.2}
_BOUND_SHARE = 0.9
_TPOT_RATIO = 0.5


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `simulate`."""
    add_shape_options(parser)
    parser.add_argument("--targets", type=float, nargs="+", default=[70.0, 100.0], help="tokens/s per user")
    parser.add_argument("--loads", type=int, nargs="+", default=[40, 60, 80, 100, 120], help="sessions at a time")
    parser.add_argument("--systems", nargs="+", choices=("stock", "ours"), default=["stock", "ours"])
    parser.add_argument("--pool-tokens", type=int, default=1_500_000, help="KV tokens that the pool holds")
    parser.add_argument("--step-model", type=Path, default=H200_DENSE_1B, help="data file of step times")
    parser.add_argument("--seconds", type=float, default=40.0, help="simulated seconds per point")
    parser.add_argument("--warm", type=float, default=10.0, help="seconds at the start that do not count")
    parser.add_argument("--budgets", type=int, nargs="+", help="max_num_batched_tokens to try on stock")
    parser.add_argument("--seqs", type=int, nargs="+", help="max_num_seqs to try on stock")
    parser.add_argument("--long-prefill", type=int, nargs="+", help="long_prefill_token_threshold to try on stock")
    parser.add_argument("--processes", type=int, default=1, help="simulations at a time")
    parser.add_argument("--records", type=Path, help="folder for the turns of each target's best points, for `report`")
    parser.add_argument("--quick", action="store_true", help="few loads and tunings, 20 simulated seconds")
    parser.add_argument("--json", metavar="FILE", help="write all figures and bars to FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 and name every bar that is not met")


def run(options: argparse.Namespace) -> int:
    """Simulate, print, and return the exit code."""
    if options.quick:
        options.seconds, options.warm = 20.0, 6.0
        options.loads = options.loads[:2]
        options.budgets, options.seqs, options.long_prefill = [512, 2048], [256], [0]
        options.targets = options.targets[:1]
    shape = shape_of(options, ramp_s=min(5.0, options.warm / 2))
    console().print(open_trace(options.trace, shape).describe())
    document: dict[str, Any] = {"targets": {}}
    outcomes: list[Outcome] = []
    for target in options.targets:
        sweep = SweepOptions(
            options.trace,
            shape,
            options.step_model,
            options.pool_tokens,
            seconds=options.seconds,
            warm_s=options.warm,
            target_tps=target,
        )
        points = [Point(t, load) for t in _tunings(options, target) for load in options.loads]
        results = list(run_points(sweep, points, options.processes, _print_progress))
        bound = upper_bound(open_trace(options.trace, shape), StepTimeModel.load(options.step_model, "ours"), target)
        outcomes += _report(results, bound, target, options)
        document["targets"][str(target)] = {
            "bound": asdict(bound),
            "points": [{"point": asdict(r.point), "figures": r.figures} for r in results],
        }
    print_outcomes(outcomes)
    write_json(options.json, document, outcomes)
    return exit_code(outcomes, options.check)


def _tunings(options: argparse.Namespace, target: float) -> list[Tuning]:
    given = {"budgets": options.budgets, "seqs": options.seqs, "long_prefill": options.long_prefill}
    tunings = (
        stock_tunings(**{name: value for name, value in given.items() if value}) if "stock" in options.systems else []
    )
    ours = Tuning("ours", max_num_seqs=max(options.seqs or STOCK_SEQS), target_tps=target)
    return [*tunings, ours] if "ours" in options.systems else tunings


def _print_progress(result: PointResult) -> None:
    figures = result.figures
    print(
        f"{result.point.tuning.name}, {result.point.num_sessions} sessions: {figures['tps_p5']:.0f} tokens/s at p95 of "
        f"turns, goodput {figures['goodput_per_gpu']:,.0f}, {figures['times_real_time']:.0f} x real time",
        file=sys.stderr,
        flush=True,
    )


_COLUMNS = {
    "goodput/GPU": ("goodput_per_gpu", "{:,.0f}"),
    "tokens/s/GPU": ("tokens_per_s_per_gpu", "{:,.0f}"),
    "tokens/s/user p50": ("tps_p50", "{:.0f}"),
    "p95": ("tps_p5", "{:.0f}"),
    "p99": ("tps_p1", "{:.0f}"),
    "TPOT p99 ms": ("tpot_ms_p99", "{:.1f}"),
    "longest gap p99 ms": ("longest_gap_ms_p99", "{:.0f}"),
    "TTFT p50 ms": ("ttft_ms_p50", "{:.0f}"),
    "TTFT p95 ms": ("ttft_ms_p95", "{:.0f}"),
    "hits": ("hit_rate", "{:.3f}"),
    "x real time": ("times_real_time", "{:.0f}"),
}


def _report(results: list[PointResult], bound: Bound, target: float, options: argparse.Namespace) -> list[Outcome]:
    chosen = {system: best(results, system, target) for system in options.systems}
    loads = {r.point.num_sessions for r in chosen.values() if r is not None}
    rows = []
    for result in results:
        is_best = any(result is one for one in chosen.values())
        tuned = result.point.tuning
        same_tuning = any(one is not None and tuned == one.point.tuning for one in chosen.values())
        if is_best or tuned.system == "ours" or (same_tuning and result.point.num_sessions in loads):
            cells = [form.format(result.figures[key]) for key, form in _COLUMNS.values()]
            rows.append((f"{'* ' if is_best else ''}{tuned.name}", str(result.point.num_sessions), *cells))
    title = f"{target:g} tokens/s per user (* best goodput with 95% of turns at the target); bound {bound.tokens_per_s:,.0f}"
    print_table(f"{title}, {bound.num_users:.0f} users", ("tuning", "sessions", *_COLUMNS), rows)
    if options.records:
        options.records.mkdir(parents=True, exist_ok=True)
        for system, result in chosen.items():
            if result is not None:
                run_facts = {"system": system, "target_tps": target, "tuning": result.point.tuning.name, "num_gpus": 1}
                run_facts |= {"num_sessions": result.point.num_sessions, "window": asdict(result.window)}
                write_records(options.records / f"{system}-{target:g}.jsonl", run_facts, result.records)
    return _bars(results, chosen, bound, target) if len(chosen) == 2 else []


def _bars(
    results: list[PointResult], chosen: dict[str, PointResult | None], bound: Bound, target: float
) -> list[Outcome]:
    def figure(system: str, name: str) -> float:
        result = chosen[system]
        if result is None:
            raise MissingFigureError(f"no point of {system} keeps {target:g} tokens/s for 95% of turns")
        return float(result.figures[name])

    def tpot_ratio() -> float:
        """At the load where ours is best: ours against stock's best tuning under the same load."""
        ours, stock = chosen["ours"], chosen["stock"]
        if ours is None or stock is None:
            raise MissingFigureError(f"a system keeps {target:g} tokens/s for 95% of turns at no load")
        same = [r for r in results if r.point == Point(stock.point.tuning, ours.point.num_sessions)]
        return float(ours.figures["tpot_ms_p99"]) / float(same[0].figures["tpot_ms_p99"])

    wanted = _GOODPUT_RATIO.get(target, 1.2)
    bars = [
        Bar(
            f"{target:g} tokens/s per user: goodput, ours / best stock",
            ">=",
            wanted,
            lambda: figure("ours", "goodput_per_gpu") / figure("stock", "goodput_per_gpu"),
        ),
        Bar(
            f"{target:g} tokens/s per user: goodput, ours / bound",
            ">=",
            _BOUND_SHARE,
            lambda: figure("ours", "goodput_per_gpu") / bound.tokens_per_s,
        ),
        Bar(f"{target:g} tokens/s per user: p99 TPOT, ours / best stock, same load", "<=", _TPOT_RATIO, tpot_ratio),
    ]
    return [bar.judge() for bar in bars]
