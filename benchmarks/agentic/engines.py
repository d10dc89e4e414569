# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.agentic engines`: stock and ours on one GPU, the same sessions in turn, and steps of known shapes.

Both engines stand side by side; sessions are played at the engine core's client, so that no HTTP server is the limit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.agentic.fit import write_step_model
from benchmarks.agentic.options import add_shape_options, shape_of
from benchmarks.agentic.records import TurnRecord, Window, figures, write_records
from benchmarks.agentic.step_time import H200_DENSE_1B
from benchmarks.agentic.tables import print_replays
from benchmarks.gpu.engine import EngineOptions
from benchmarks.gpu.engine_client import EngineFailedError, EngineProcess, engines
from benchmarks.gpu.models import MODELS, TINY_MODELS, write_model
from benchmarks.report import Bar, MissingFigureError, Outcome, exit_code, print_outcomes, write_json

_GOODPUT_RATIO, _TPOT_RATIO = 1.3, 0.5
_RETURN_TTFT_RATIO, _RETURN_TPOT_RATIO = 0.91, 1.0
_DECODES = [[16, 1024], [64, 1024], [256, 1024], [16, 16_384], [32, 8192], [64, 4096], [64, 8192]]
_PREFILLS = [[0, 512], [0, 2048], [8192, 512], [16_384, 2048]]
_HOST_ROWS, _SHORT_CONTEXT = (1, 16, 64, 256), 64  # steps that the engine's own CPU time rules
STEP_MODEL, SUMMARY = "step-model.json", "engines.json"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `engines`."""
    add_shape_options(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=sorted(MODELS), default="dense")
    parser.add_argument("--tiny", action="store_true", help="a tiny model of that kind; figures mean nothing")
    parser.add_argument("--loads", type=int, nargs="+", default=[40, 80, 120], help="sessions at a time")
    parser.add_argument("--target", type=float, default=70.0, help="tokens/s per user")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each point")
    parser.add_argument("--warm", type=float, default=5.0, help="seconds of each point that do not count")
    parser.add_argument("--budget", type=int, default=2048, help="max_num_batched_tokens of stock; ours has 8192")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--stock-seqs", type=int, help="max_num_seqs of stock; default: as ours")
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


class EngineRun:
    """A run with its deadline; what is done is written at once."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.figures: dict[str, dict[str, Any]] = {}
        self.shapes: dict[str, Any] = {}
        self.alone: dict[str, dict[str, Any]] = {}
        self._options = options
        self._deadline = time.monotonic() + options.total_seconds
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)

    def run(self, folder: Path) -> None:
        """Build both engines and measure."""
        options = self._options
        model = (TINY_MODELS if options.tiny else MODELS)[options.model]
        base = EngineOptions(
            "stock",
            str(write_model(model, folder)),
            int(options.kv_gib * (1 << 30)),
            options.device,
            max_requests=options.max_num_seqs,
            max_model_tokens=options.max_model_len,
        )
        settings = {**asdict(base), "serve_flags": ()}
        entries = [
            EngineOptions(
                **{
                    **settings,
                    "max_requests": options.stock_seqs,
                    "budget_tokens": max(options.budget, options.stock_seqs),
                }
            ),
            EngineOptions(**{**settings, "system": "ours"}),
        ]
        environment = {"TOKENSPEED_TARGET_TPS_PER_USER": f"{options.target:g}"}
        left_s = self._deadline - time.monotonic()
        with engines(entries, folder, left_s, environment) as running:
            self._measure_alone(running)
            if not options.no_shapes:
                self._measure_shapes(running)
            for load in options.loads:
                for system, engine in running.items():
                    self._play(system, engine, load)

    def _has_time(self, seconds: float, what: str) -> bool:
        left_s = self._deadline - time.monotonic()
        if left_s < seconds:
            print(f"left out: {what} ({left_s:.0f} s left, {seconds:.0f} needed)", file=sys.stderr, flush=True)
        return left_s >= seconds

    def _measure_alone(self, running: dict[str, EngineProcess]) -> None:
        """One session whose turns come back to a long history, the systems in turn."""
        options = self._options
        history = min(options.history, options.max_model_len - 4096)
        if history <= 0 or not self._has_time(30, "one session alone"):
            return
        for system, engine in running.items():
            try:
                self.alone[system] = engine.run("returning_turns", history=history, label=f"alone-{system}")
            except EngineFailedError as error:
                self.alone[system] = {"error": str(error)}
        print(f"one session alone: {self.alone}", file=sys.stderr, flush=True)

    def _measure_shapes(self, running: dict[str, EngineProcess]) -> None:
        if not self._has_time(60, "steps of known shapes"):
            return
        options = self._options
        most = options.max_model_len - 4100
        decodes = [[n, context] for n, context in _DECODES if context <= most and n <= options.stock_seqs]
        prefills = [[b, new] for b, new in _PREFILLS if b + new <= most and new <= options.budget]
        short = [[n, _SHORT_CONTEXT] for n in _HOST_ROWS if n <= options.stock_seqs]
        start = time.monotonic()
        try:
            self.shapes = running["stock"].run("step_shapes", decodes=decodes, prefills=prefills)
            self.shapes["short"] = {
                system: engine.run("step_shapes", decodes=short, prefills=[])["rows"]
                for system, engine in running.items()
            }
        except EngineFailedError as error:
            self.shapes = {"error": str(error)}
            return
        self.shapes["seconds"] = time.monotonic() - start
        if options.out is not None:
            target = options.out / STEP_MODEL
            try:
                self.shapes["error_of_fit"] = write_step_model(
                    H200_DENSE_1B, target, self.shapes["rows"], " ".join(sys.argv), self.shapes["short"]
                )
            except ValueError as error:
                self.shapes["not_fitted"] = str(error)
        print(f"steps of known shapes: {self.shapes}", file=sys.stderr, flush=True)

    def _play(self, system: str, engine: EngineProcess, load: int) -> None:
        options = self._options
        if not self._has_time(options.seconds + 15, f"{system}, {load} sessions"):
            return
        shape = shape_of(options, load, ramp_s=min(3.0, options.warm / 2))
        label = f"{system}{load}"
        try:
            answer = engine.run(
                "sessions", trace=options.trace, shape=asdict(shape), label=label, seconds=options.seconds
            )
        except EngineFailedError as error:
            self.figures[f"{system}, {load} sessions"] = {"error": str(error)}
            print(f"error: {error}", file=sys.stderr, flush=True)
            return
        records = msgspec.convert(answer["records"], list[TurnRecord])
        window = Window(options.warm, options.seconds)
        found = figures(records, window, options.target)
        self.figures[f"{system}, {load} sessions"] = {**found, "system": system, "num_sessions": load}
        if options.out is not None:
            facts = {"system": system, "target_tps": options.target, "num_gpus": 1, "num_sessions": load}
            write_records(options.out / f"{label}.jsonl", {**facts, "window": asdict(window)}, records)
        print(
            f"{label}: p95 {found['tps_p5']:.0f} tokens/s, goodput {found['goodput_per_gpu']:,.0f}",
            file=sys.stderr,
            flush=True,
        )


def run(options: argparse.Namespace) -> int:
    """Measure, print, and return the exit code."""
    if options.quick:
        options.loads, options.seconds, options.warm = options.loads[:1], 5.0, 1.0
    options.most_tokens = min(options.most_tokens, options.max_model_len)
    options.stock_seqs = options.stock_seqs or options.max_num_seqs
    measured = EngineRun(options)
    failure = ""
    with tempfile.TemporaryDirectory(prefix="agentic-") as name:
        try:
            measured.run(Path(name))
        except EngineFailedError as error:
            failure = str(error)
            print(f"error: {failure}", file=sys.stderr)
    whole = {label: one for label, one in measured.figures.items() if "error" not in one}
    for load in options.loads:
        columns = {label: one for label, one in whole.items() if label.endswith(f", {load} sessions")}
        if columns:
            print_replays(columns, options.target)
    outcomes = [*_outcomes(whole, options), *_alone_outcomes(measured.alone)]
    print_outcomes(outcomes)
    document = {
        "options": {name: value for name, value in vars(options).items() if not isinstance(value, Path)},
        "replays": measured.figures,
        "alone": measured.alone,
        "shapes": measured.shapes,
        "failure": failure,
    }
    write_json(options.json or (str(options.out / SUMMARY) if options.out else None), document, outcomes)
    return exit_code(outcomes, options.check)


def _alone_outcomes(alone: dict[str, dict[str, Any]]) -> list[Outcome]:
    def ratio(name: str) -> float:
        missing = [system for system in ("stock", "ours") if name not in alone.get(system, {})]
        if missing:
            raise MissingFigureError(f"one session alone was not measured with {', '.join(missing)}")
        return float(alone["ours"][name]) / float(alone["stock"][name])

    claims = {
        "ttft_ms": ("TTFT of a returning turn", _RETURN_TTFT_RATIO),
        "tpot_ms": ("TPOT", _RETURN_TPOT_RATIO),
    }
    return [
        Bar(f"one session alone: {claim}, ours / stock", "<=", limit, lambda name=name: ratio(name)).judge()
        for name, (claim, limit) in claims.items()
    ]


def _outcomes(whole: dict[str, dict[str, Any]], options: argparse.Namespace) -> list[Outcome]:
    def best(system: str) -> dict[str, Any]:
        meeting = [f for f in whole.values() if f["system"] == system and f["tps_p5"] >= options.target]
        if not meeting:
            raise MissingFigureError(f"{system} keeps {options.target:g} tokens/s for 95% of turns at no load")
        return max(meeting, key=lambda f: float(f["goodput_per_gpu"]))

    def tpot_ratio() -> float:
        ours = best("ours")
        stock = whole.get(f"stock, {ours['num_sessions']} sessions")
        if stock is None:
            raise MissingFigureError("stock was not measured at the load where ours is best")
        return float(ours["tpot_ms_p99"]) / float(stock["tpot_ms_p99"])

    claim = f"{options.target:g} tokens/s per user"
    goodput = Bar(
        f"{claim}: goodput, ours / stock",
        ">=",
        _GOODPUT_RATIO,
        lambda: float(best("ours")["goodput_per_gpu"]) / float(best("stock")["goodput_per_gpu"]),
    )
    return [goodput.judge(), Bar(f"{claim}: p99 TPOT, ours / stock, same load", "<=", _TPOT_RATIO, tpot_ratio).judge()]
