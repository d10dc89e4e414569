# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.agentic engines`: stock and ours on one GPU, the same sessions in turn, and steps of known shapes.

Both engines stand side by side; sessions are played at the engine core's client, so that no HTTP server is the limit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.agentic.engine_bars import alone_bars, point_bars
from benchmarks.agentic.engine_run import EngineRun
from benchmarks.agentic.measured_run import STEP_MODEL, SUMMARY, MeasuredRun
from benchmarks.agentic.options import add_shape_options, add_target_options, command_line
from benchmarks.agentic.tables import print_replays
from benchmarks.gpu.engine_client import EngineFailedError
from benchmarks.gpu.models import MODELS
from benchmarks.report import Outcome, exit_code, print_outcomes, write_json


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `engines`."""
    add_shape_options(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=sorted(MODELS), default="dense")
    parser.add_argument("--tiny", action="store_true", help="a tiny model of that kind; figures mean nothing")
    parser.add_argument("--loads", type=int, nargs="+", default=[40, 80, 120], help="sessions at a time")
    parser.add_argument("--target", type=float, default=70.0, help="tokens/s per user")
    add_target_options(parser)
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[0.0],
        help="what requests ask ours for at the first load, a point each, tokens/s; 0: nothing, so that the target holds",
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each point")
    parser.add_argument("--warm", type=float, default=5.0, help="seconds of each point that do not count")
    parser.add_argument(
        "--budget",
        type=int,
        default=2048,
        help="max_num_batched_tokens of stock when it is tuned; ours has --most-budget",
    )
    parser.add_argument("--most-budget", type=int, default=8192, help="max_num_batched_tokens that both start with")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--stock-seqs", type=int, help="max_num_seqs of untuned stock; default: as ours")
    parser.add_argument(
        "--first-limits",
        type=int,
        nargs=2,
        metavar=("SEQS", "TOKENS"),
        help="with which the search of stock's limits begins; default: those of the start",
    )
    parser.add_argument("--max-model-len", type=int, default=32_768)
    parser.add_argument("--kv-gib", type=float, default=56.0, help="KV cache of each engine")
    parser.add_argument(
        "--total-seconds", type=float, default=440.0, help="what does not fit into it is left out, and says so"
    )
    parser.add_argument("--no-shapes", action="store_true", help="do not measure steps of known shapes")
    parser.add_argument(
        "--history",
        type=int,
        default=65_536,
        help="tokens of the one session of the point of least latency; 0: no such point",
    )
    parser.add_argument("--out", type=Path, help="folder for records, the fitted step model and all figures")
    parser.add_argument("--quick", action="store_true", help="one load, 5 seconds")
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 and name every bar that is not met")


def run(options: argparse.Namespace) -> int:
    """Measure, print, and return the exit code."""
    if options.quick:
        options.loads, options.seconds, options.warm = options.loads[:1], 5.0, 1.0
    options.most_tokens = min(options.most_tokens, options.max_model_len)
    options.stock_seqs = options.stock_seqs or options.max_num_seqs
    failure = ""
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    measured = EngineRun(options, lambda run: _save(run, options, ""))
    with tempfile.TemporaryDirectory(prefix="agentic-") as name:
        try:
            measured.run(Path(name))
        except EngineFailedError as error:
            failure = str(error)
            print(f"error: {failure}", file=sys.stderr)
    whole = {label: one for label, one in measured.figures.items() if "error" not in one}
    for load in options.loads:
        columns = {label: one for label, one in whole.items() if one["num_sessions"] == load}
        if columns:
            print_replays(columns, options.target, options.also_targets)
    outcomes = _save(measured, options, failure)
    if options.out is not None:
        _fit(options.out)
    print_outcomes(outcomes)
    return exit_code(outcomes, options.check)


def _fit(folder: Path) -> None:
    """Write the step model that fits the run; say why where there is none. What was measured is kept in any case."""
    try:
        error = MeasuredRun(folder).write_step_model(folder / STEP_MODEL)
    except (ValueError, ArithmeticError, LookupError) as reason:
        print(f"no step model fits: {type(reason).__name__}: {reason}", file=sys.stderr, flush=True)
        return
    said = (
        "no step model: no steps of known shapes" if error is None else f"step model, mean relative error {error:.3f}"
    )
    print(said, file=sys.stderr, flush=True)


def _save(measured: EngineRun, options: argparse.Namespace, failure: str) -> list[Outcome]:
    """Write what there is so far; return its bars."""
    whole = [one for one in measured.figures.values() if "error" not in one]
    outcomes = [bar for target in (options.target, *options.also_targets) for bar in point_bars(whole, target)]
    outcomes += alone_bars(measured.alone)
    document = {
        "command": command_line(),
        "options": {name: value for name, value in vars(options).items() if not isinstance(value, Path)},
        "engines": measured.engines,
        "replays": measured.figures,
        "alone": measured.alone,
        "shapes": measured.shapes,
        "references": measured.references,
        "failure": failure,
    }
    write_json(options.json or (str(options.out / SUMMARY) if options.out else None), document, outcomes)
    return outcomes
