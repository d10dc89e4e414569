# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.agentic simulate`: systems on a step-time model, the best of each, and the bound."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.agentic.bound import Bound, upper_bound
from benchmarks.agentic.goodput_bars import bars
from benchmarks.agentic.options import add_shape_options, shape_of
from benchmarks.agentic.records import write_records
from benchmarks.agentic.shaping import open_trace
from benchmarks.agentic.step_time import H200_DENSE_1B, StepTimeModel
from benchmarks.agentic.sweep import (
    STOCK_BUDGETS,
    STOCK_LONG_PREFILL,
    STOCK_SEQS,
    Point,
    PointResult,
    SweepOptions,
    Tuning,
    best,
    most_promising,
    run_points,
    stock_tunings,
)
from benchmarks.report import (
    Outcome,
    console,
    exit_code,
    print_outcomes,
    print_table,
    write_json,
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `simulate`."""
    add_shape_options(parser)
    parser.add_argument("--targets", type=float, nargs="+", default=[70.0, 100.0], help="tokens/s per user")
    parser.add_argument("--loads", type=int, nargs="+", default=[45, 60, 80, 110], help="sessions at a time")
    parser.add_argument("--systems", nargs="+", choices=("stock", "ours"), default=["stock", "ours"])
    parser.add_argument("--pool-tokens", type=int, default=1_500_000, help="KV tokens that the pool holds")
    parser.add_argument("--step-model", type=Path, default=H200_DENSE_1B, help="data file of step times")
    parser.add_argument("--seconds", type=float, default=30.0, help="simulated seconds per point")
    parser.add_argument("--warm", type=float, default=8.0, help="seconds at the start that do not count")
    parser.add_argument("--budgets", type=int, nargs="+", help="max_num_batched_tokens to try on stock")
    parser.add_argument("--seqs", type=int, nargs="+", help="max_num_seqs to try on stock")
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[0.0],
        help="tokens/s per user that ours is asked for, a tuning each; 0: the target that it is judged by",
    )
    parser.add_argument("--long-prefill", type=int, nargs="+", help="long_prefill_token_threshold to try on stock")
    parser.add_argument(
        "--screen",
        type=float,
        default=12.0,
        help="simulated seconds of the runs by which stock is tuned, knob by knob; 0: every combination is run whole",
    )
    parser.add_argument("--keep", type=int, default=2, help="tunings of stock that are run whole after that")
    parser.add_argument("--processes", type=int, default=1, help="simulations at a time")
    parser.add_argument("--records", type=Path, help="folder for the turns of each target's best points, for `report`")
    parser.add_argument(
        "--graphs-unknown",
        action="store_true",
        help="simulate ours a second time, without telling it for how many tokens CUDA graphs are captured",
    )
    parser.add_argument("--quick", action="store_true", help="few loads and tunings, 20 simulated seconds")
    parser.add_argument("--json", metavar="FILE", help="write all figures and bars to FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 and name every bar that is not met")


def run(options: argparse.Namespace) -> int:
    """Simulate, print, and return the exit code."""
    if options.quick:
        options.seconds, options.warm = 20.0, 6.0
        options.loads = options.loads[:2]
        options.budgets, options.seqs, options.long_prefill = [512, 2048], [256], [0]
        options.targets, options.screen = options.targets[:1], 0.0
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
        tunings = _tunings(options, sweep)
        points = [Point(t, load) for t in tunings for load in options.loads]
        results = list(run_points(sweep, points, options.processes, _print_progress))
        bound = _bound(results, sweep)
        outcomes += _report(results, bound, target, options)
        document["targets"][str(target)] = {
            "bound": asdict(bound),
            "points": [{"point": asdict(r.point), "figures": r.figures} for r in results],
        }
    print_outcomes(outcomes)
    write_json(options.json, document, outcomes)
    return exit_code(outcomes, options.check)


def _tunings(options: argparse.Namespace, sweep: SweepOptions) -> list[Tuning]:
    tunings: list[Tuning] = []
    if "stock" in options.systems and options.screen:
        tunings = _hand_tuned(sweep, options)
    elif "stock" in options.systems:
        given = {"budgets": options.budgets, "seqs": options.seqs, "long_prefill": options.long_prefill}
        tunings = stock_tunings(**{name: value for name, value in given.items() if value})
    if "ours" in options.systems:
        ours = Tuning("ours", max_num_seqs=max(options.seqs or STOCK_SEQS), target_tps=sweep.target_tps)
        tunings += [replace(ours, target_tps=rate or sweep.target_tps) for rate in options.rates]
        tunings += [replace(ours, knows_graphs=False)] if options.graphs_unknown else []
    return tunings


def _hand_tuned(sweep: SweepOptions, options: argparse.Namespace) -> list[Tuning]:
    """Return the best `--keep` tunings of stock by short simulations: one knob after the other, each from the best so far."""
    knobs = {
        "max_num_seqs": options.seqs or STOCK_SEQS,
        "budget_tokens": options.budgets or STOCK_BUDGETS,
        "long_prefill_tokens": options.long_prefill or STOCK_LONG_PREFILL,
    }
    short = replace(sweep, seconds=options.screen, warm_s=options.screen / 4)
    results: list[PointResult] = []
    chosen = Tuning("stock", budget_tokens=2048)
    for knob, values in knobs.items():
        turned = [replace(chosen, **{knob: value}) for value in values]
        tried = {result.point.tuning for result in results}
        tunings = [t for t in turned if t not in tried and t.long_prefill_tokens < t.budget_tokens]
        points = [Point(tuning, load) for tuning in tunings for load in options.loads]
        results += run_points(short, points, options.processes, _print_progress)
        chosen = most_promising(results, sweep.target_tps, 1)[0]
    kept = most_promising(results, sweep.target_tps, options.keep)
    print(f"run whole: {', '.join(tuning.name for tuning in kept)}", file=sys.stderr, flush=True)
    return kept


def _bound(results: list[PointResult], sweep: SweepOptions) -> Bound:
    """Return the bound for the traffic that was played where ours is best, or for the whole trace."""
    result = best(results, "ours", sweep.target_tps)
    if result is not None and result.bound is not None:
        return result.bound
    times = StepTimeModel.load(sweep.step_model, "ours")
    return upper_bound(open_trace(sweep.trace, sweep.shape), times, sweep.target_tps)


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
    "least p99": ("least_tpot_ms_p99", "{:.1f}"),
    "longest gap p99 ms": ("longest_gap_ms_p99", "{:.0f}"),
    "TTFT p50 ms": ("ttft_ms_p50", "{:.0f}"),
    "TTFT p95 ms": ("ttft_ms_p95", "{:.0f}"),
    "hits": ("hit_rate", "{:.3f}"),
    "model error": ("model_error", "{:.3f}"),
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
    return bars(results, chosen, bound, target) if len(chosen) == 2 else []
