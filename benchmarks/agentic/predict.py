# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.agentic predict`: the simulator's figures for the points that `engines` measured, and its error."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.agentic.busy import SessionsSeen
from benchmarks.agentic.engine_run import STEP_MODEL, point_label
from benchmarks.agentic.engines import SUMMARY
from benchmarks.agentic.fit import write_step_model
from benchmarks.agentic.options import shape_of
from benchmarks.agentic.records import RecordError, Window, figures, read_records
from benchmarks.agentic.step_time import H200_DENSE_1B
from benchmarks.agentic.sweep import Point, SweepOptions, Tuning, run_points
from benchmarks.report import Bar, MissingFigureError, Outcome, exit_code, print_outcomes, print_table, write_json

_ERROR = 0.15
_FIGURES = {
    "tokens_per_s_per_gpu": "tokens/s per GPU",
    "tps_p50": "tokens/s per user p50",
    "tps_p5": "p95",
    "tpot_ms_p99": "TPOT p99 ms",
    "ttft_ms_p50": "TTFT p50 ms",
}
# Of these the error is judged: what a user gets, and what the machine gives.
_JUDGED = ("tokens_per_s_per_gpu", "tps_p50")


class _Engine(msgspec.Struct):
    num_blocks: int
    block_tokens: int


class _Summary(msgspec.Struct):
    options: dict[str, Any]
    replays: dict[str, dict[str, Any]]
    engines: dict[str, _Engine]
    shapes: dict[str, Any] = {}
    command: str = "python -m benchmarks.agentic engines"


@dataclass(frozen=True)
class Prediction:
    """A measured point beside the simulated one."""

    name: str
    measured: dict[str, Any]
    simulated: dict[str, Any]

    @property
    def judged(self) -> list[str]:
        """The figures by which it is judged: those of `_JUDGED` that were measured. Where users waited for longer than a
        point took, no rate per user was.
        """
        return [figure for figure in _JUDGED if not math.isnan(self.measured[figure])]

    def error(self, figure: str) -> float:
        """Return |simulated - measured| / measured."""
        return abs(self.simulated[figure] - self.measured[figure]) / self.measured[figure]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `predict`."""
    parser.add_argument("folder", type=Path, help="what `engines --out` wrote")
    parser.add_argument("--trace", help="where the trace is on this machine; default: as it was named for `engines`")
    parser.add_argument("--step-model", type=Path, help="default: fitted to what `engines` measured")
    parser.add_argument("--save-model", type=Path, metavar="FILE", help="keep the fitted step model")
    parser.add_argument(
        "--held-out", action="store_true", help="simulate each point with a step model fitted to all the others"
    )
    parser.add_argument("--points", nargs="+", help="simulate those whose name contains one of these; default: all")
    parser.add_argument("--processes", type=int, default=1, help="simulations at a time")
    parser.add_argument("--json", metavar="FILE", help="write all figures and bars to FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 and name every bar that is not met")


def run(options: argparse.Namespace) -> int:
    """Simulate, print, and return the exit code."""
    summary = _read(options.folder / SUMMARY)
    wanted = options.points or [""]
    measured = {
        label: one
        for label, one in summary.replays.items()
        if "error" not in one and any(part in label for part in wanted)
    }
    found: list[Prediction] = []
    with tempfile.TemporaryDirectory(prefix="agentic-") as name:
        fitted = options.save_model or Path(name) / STEP_MODEL
        if options.held_out:
            for label, one in measured.items():
                model = options.step_model or _fitted(options, summary, Path(name) / STEP_MODEL, left_out=label)
                found += _simulated(options, summary, {label: one}, model)
        else:
            model = options.step_model or _fitted(options, summary, fitted)
            found = _simulated(options, summary, measured, model)
    return _judged(found, options)


def _fitted(options: argparse.Namespace, summary: _Summary, target: Path, left_out: str = "") -> Path:
    """Fit a step model to the measured steps; without any take the one that is there."""
    rows, short = summary.shapes.get("rows"), summary.shapes.get("short")
    if not rows or not short:
        return Path(options.folder) / STEP_MODEL
    seen: dict[str, list[SessionsSeen]] = {}
    for label, one in summary.replays.items():
        if "error" not in one and label != left_out:
            seen.setdefault(one["system"], []).append(_seen(options.folder, one))
    write_step_model(H200_DENSE_1B, target, rows, summary.command, short, seen=seen)
    return target


def _seen(folder: Path, point: dict[str, Any]) -> SessionsSeen:
    recorded = read_records(folder / f"{(label := point_label(point))}.jsonl")
    steps = json.loads((folder / f"{label}.steps.json").read_bytes())
    return SessionsSeen(steps, recorded.records, Window(**recorded.run["window"]), point.get("budget_tokens", 0))


def _simulated(
    options: argparse.Namespace, summary: _Summary, measured: dict[str, dict[str, Any]], step_model: Path
) -> list[Prediction]:
    then = argparse.Namespace(**summary.options)
    pool = min(summary.engines.values(), key=lambda engine: engine.num_blocks)
    sweep = SweepOptions(
        options.trace or then.trace,
        shape_of(then, ramp_s=min(3.0, then.warm / 2)),
        step_model,
        pool.num_blocks * pool.block_tokens,
        pool.block_tokens,
        seconds=then.seconds,
        warm_s=then.warm,
        target_tps=then.target,
    )
    points = [Point(_tuning(one, then), one["num_sessions"]) for one in measured.values()]
    results = run_points(sweep, points, options.processes)
    return [
        Prediction(label, _figures(options.folder, one, then), result.figures)
        for (label, one), result in zip(measured.items(), results, strict=True)
    ]


def _figures(folder: Path, point: dict[str, Any], then: argparse.Namespace) -> dict[str, Any]:
    """Return a point's figures as they are counted today, from its turns, or as they were written where those are gone."""
    path = folder / f"{point_label(point)}.jsonl"
    if not path.exists():
        return point
    recorded = read_records(path)
    return {**point, **figures(recorded.records, Window(**recorded.run["window"]), then.target)}


def _judged(found: list[Prediction], options: argparse.Namespace) -> int:
    rows = [
        (
            prediction.name,
            *(f"{prediction.measured[f]:,.1f} / {prediction.simulated[f]:,.1f}" for f in _FIGURES),
            f"{max(prediction.error(figure) for figure in prediction.judged):.1%}",
        )
        for prediction in found
    ]
    print_table("measured / simulated", ("point", *_FIGURES.values(), "error"), rows)
    outcomes = [_outcome(found)]
    print_outcomes(outcomes)
    points_found = {p.name: {"simulated": p.simulated, "errors": {f: p.error(f) for f in _FIGURES}} for p in found}
    write_json(options.json, {"predictions": points_found}, outcomes)
    return exit_code(outcomes, options.check)


def _tuning(measured: dict[str, Any], then: argparse.Namespace) -> Tuning:
    if measured["system"] == "stock":
        return Tuning("stock", measured["budget_tokens"], measured["max_num_seqs"])
    return Tuning("ours", then.most_budget, then.max_num_seqs, target_tps=measured.get("asked_tps") or then.target)


def _outcome(found: list[Prediction]) -> Outcome:
    def worst() -> float:
        errors = [prediction.error(figure) for prediction in found for figure in prediction.judged]
        if not errors:
            raise MissingFigureError("no point was measured")
        return math.nan if any(math.isnan(error) for error in errors) else max(errors)

    return Bar("largest error of the simulator, tokens/s per GPU and per user", "<=", _ERROR, worst).judge()


def _read(path: Path) -> _Summary:
    try:
        return msgspec.convert(json.loads(path.read_text()), _Summary)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise RecordError(f"{path}: {error}; needed: what `engines --out` wrote") from error
