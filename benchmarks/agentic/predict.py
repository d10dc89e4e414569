# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.agentic predict`: the simulator's figures for the points that `engines` measured, and its error."""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.agentic.engine_bars import PointFigures, point_bars
from benchmarks.agentic.measured_run import STEP_MODEL, MeasuredRun, host_slowness
from benchmarks.agentic.options import add_target_options, shape_of
from benchmarks.agentic.records import goodput_at
from benchmarks.agentic.step_time import StepTimeModel
from benchmarks.agentic.sweep import Point, PointResult, SweepOptions, Tuning, run_points
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


@dataclass(frozen=True)
class Prediction:
    """A measured point beside the simulated one."""

    name: str
    measured: PointFigures
    simulated: PointFigures
    host_slowness: float | None
    """How many times as long the host took as in the step model's run; None where nobody knows, and nothing is corrected."""

    @property
    def judged(self) -> list[str]:
        """The figures by which it is judged: those of `_JUDGED` that were measured. Where users waited for longer than a
        point took, no rate per user was.
        """
        return [figure for figure in _JUDGED if not math.isnan(self.measured[figure])]

    def error(self, figure: str) -> float:
        """Return |simulated - measured| / measured."""
        return abs(self.simulated[figure] - self.measured[figure]) / self.measured[figure]

    def goodput(self, target: str) -> str:
        """Return measured and simulated goodput at a further target; what was not kept of a point is no figure."""
        measured = self.measured["goodput_at"].get(target, math.nan)
        return f"{measured:,.0f} / {self.simulated['goodput_at'][target]:,.0f}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `predict`."""
    parser.add_argument("folder", type=Path, help="what `engines --out` wrote")
    parser.add_argument("--trace", help="where the trace is on this machine; default: as it was named for `engines`")
    add_target_options(parser)
    parser.add_argument("--step-model", type=Path, help="default: fitted to what `engines` measured")
    parser.add_argument("--save-model", type=Path, metavar="FILE", help="keep the fitted step model")
    parser.add_argument(
        "--held-out", action="store_true", help="simulate each point with a step model fitted to all the others"
    )
    parser.add_argument(
        "--same-host",
        action="store_true",
        help="take the host to be as fast as in the step model's run, whatever reference steps say",
    )
    parser.add_argument("--points", nargs="+", help="simulate those whose name contains one of these; default: all")
    parser.add_argument("--processes", type=int, default=1, help="simulations at a time")
    parser.add_argument("--json", metavar="FILE", help="write all figures and bars to FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 where the simulator's error exceeds its bar")


def run(options: argparse.Namespace) -> int:
    """Simulate, print, and return the exit code."""
    measured = MeasuredRun(options.folder)
    wanted = options.points or [""]
    points = {name: point for name, point in measured.points.items() if any(part in name for part in wanted)}
    found: list[Prediction] = []
    with tempfile.TemporaryDirectory(prefix="agentic-") as name:
        place = Path(name) / STEP_MODEL
        if options.held_out:
            for label, point in points.items():
                model = options.step_model or _fitted(measured, place, left_out=label)
                found += _simulated(options, measured, {label: point}, model)
        else:
            model = options.step_model or _fitted(measured, options.save_model or place)
            found = _simulated(options, measured, points, model)
    return _judged(found, measured, options)


def _fitted(measured: MeasuredRun, target: Path, left_out: str = "") -> Path:
    """Fit a step model to the measured steps; without any take the one that is there."""
    return target if measured.write_step_model(target, left_out) is not None else measured.step_model()


def _simulated(
    options: argparse.Namespace, measured: MeasuredRun, points: dict[str, PointFigures], step_model: Path
) -> list[Prediction]:
    then = argparse.Namespace(**measured.options)
    pool_tokens, block_tokens = measured.pool()
    sweep = SweepOptions(
        options.trace or then.trace,
        shape_of(then, ramp_s=min(3.0, then.warm / 2)),
        step_model,
        pool_tokens,
        block_tokens,
        seconds=then.seconds,
        warm_s=then.warm,
        target_tps=then.target,
    )
    reference_ms = {} if options.same_host else StepTimeModel.load(step_model, "stock").data.reference_ms
    slowness = {name: host_slowness(point, reference_ms) for name, point in points.items()}
    wanted = [
        Point(_tuning(point, then), point["num_sessions"], slowness[name] or 1.0) for name, point in points.items()
    ]
    results = run_points(sweep, wanted, options.processes)
    return [
        Prediction(name, measured.figures(point, options.also_targets), _all_targets(result, options), slowness[name])
        for (name, point), result in zip(points.items(), results, strict=True)
    ]


def _all_targets(result: PointResult, options: argparse.Namespace) -> PointFigures:
    return {**result.figures, "goodput_at": goodput_at(result.records, result.window, options.also_targets)}


def _judged(found: list[Prediction], measured: MeasuredRun, options: argparse.Namespace) -> int:
    also = [f"{target:g}" for target in options.also_targets]
    rows = [
        (
            prediction.name,
            *(f"{prediction.measured[f]:,.1f} / {prediction.simulated[f]:,.1f}" for f in _FIGURES),
            *(prediction.goodput(target) for target in also),
            "-" if prediction.host_slowness is None else f"{prediction.host_slowness:.2f}",
            f"{max(prediction.error(figure) for figure in prediction.judged):.1%}",
        )
        for prediction in found
    ]
    columns = ("point", *_FIGURES.values(), *(f"goodput at {target}" for target in also), "host", "error")
    print_table(
        "measured / simulated; host: its time around the point over that of the step model's run", columns, rows
    )
    seen = [prediction.measured for prediction in found]
    targets = (measured.options["target"], *options.also_targets)
    print_outcomes(bars := [bar for target in targets for bar in point_bars(seen, target)])
    print_outcomes(outcomes := [_outcome(found)])
    points_found = {
        p.name: {
            "simulated": p.simulated,
            "errors": {f: p.error(f) for f in _FIGURES},
            "host_slowness": p.host_slowness,
        }
        for p in found
    }
    write_json(options.json, {"predictions": points_found}, [*bars, *outcomes])
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
