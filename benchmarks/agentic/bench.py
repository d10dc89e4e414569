# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.agentic bench`: stock and ours, each behind `vllm serve`, under the same replays."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.agentic.options import add_shape_options, shape_of
from benchmarks.agentic.records import RecordFile
from benchmarks.agentic.replayer import Replay, ReplayOptions, ServerFailsError
from benchmarks.agentic.replayer import replay as run_replay
from benchmarks.agentic.shaping import open_trace
from benchmarks.agentic.streaming import Target
from benchmarks.agentic.tables import print_replays
from benchmarks.gpu.engine import SYSTEMS, EngineOptions
from benchmarks.gpu.engine_client import EngineFailedError
from benchmarks.gpu.models import MODELS, TINY_MODELS, write_model
from benchmarks.gpu.server import server
from benchmarks.report import Bar, MissingFigureError, Outcome, console, exit_code, print_outcomes, write_json

_FIRST_TOKEN, _TOKEN_KINDS = 300, 7800  # of the benchmark's tokenizer: past special tokens and single bytes


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench`."""
    add_shape_options(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--model", choices=sorted(MODELS), default="dense", help="written by the benchmark, dummy weights"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model of that kind; figures mean nothing")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--loads", type=int, nargs="+", default=[16, 32, 64], help="sessions at a time")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each replay; 0: play it to its end")
    parser.add_argument("--warm", type=float, default=8.0, help="seconds at the start that do not count")
    parser.add_argument("--target", type=float, default=70.0, help="tokens/s per user")
    parser.add_argument("--ours-target", type=float, help="--target-tps-per-user of ours; default: --target")
    parser.add_argument("--stock-budgets", type=int, nargs="+", default=[2048], help="max_num_batched_tokens of stock")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=32_768)
    parser.add_argument("--kv-gib", type=float, default=0.0, help="KV cache of each server; 0: the model's own")
    parser.add_argument("--startup-seconds", type=float, default=240.0)
    parser.add_argument("--one-by-one", action="store_true", help="never two servers at a time")
    parser.add_argument("--records", type=Path, help="folder for JSON lines of every replay")
    parser.add_argument("--quick", action="store_true", help="one load, 2 turns a session")
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 when turns failed or a system is missing")


def run(options: argparse.Namespace) -> int:
    """Start servers, replay, print; return the exit code."""
    if options.quick:
        options.loads, options.most_turns, options.seconds, options.warm = options.loads[:1], 2, 0.0, 0.0
    options.most_tokens = min(options.most_tokens, options.max_model_len)
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="agentic-") as name:
        folder = Path(name)
        model = (TINY_MODELS if options.tiny else MODELS)[options.model]
        kv_bytes = int(options.kv_gib * (1 << 30)) or model.kv_cache_bytes
        entries = _entries(options, str(write_model(model, folder)), kv_bytes)
        groups = [[entry] for entry in entries] if options.one_by_one else [entries]
        for group in groups:
            try:
                with _servers(group, folder, options.startup_seconds) as addresses:
                    for load in options.loads:
                        for label, address in addresses.items():
                            figures[f"{label}, {load} sessions"] = _replay(address, label, load, options)
            except EngineFailedError as error:
                print(f"error: {error}", file=sys.stderr)
                figures.setdefault(group[0][0], {"error": str(error)})
    measured = {label: one for label, one in figures.items() if "error" not in one}
    for load in options.loads:
        ending = f", {load} sessions"
        print_replays({k: v for k, v in measured.items() if k.endswith(ending)}, options.target)
    outcomes = _outcomes(figures, options)
    print_outcomes(outcomes)
    write_json(options.json, {"replays": figures}, outcomes)
    return exit_code(outcomes, options.check)


def _entries(options: argparse.Namespace, model_folder: str, kv_bytes: int) -> list[tuple[str, EngineOptions]]:
    """Return the servers to start, by label: stock with each budget, ours with its target."""
    base = EngineOptions(
        "stock",
        model_folder,
        kv_bytes,
        options.device,
        max_requests=options.max_num_seqs,
        max_model_tokens=options.max_model_len,
        serve_flags=("--enable-prompt-tokens-details",),
    )
    entries = []
    if "stock" in options.systems:
        for budget in options.stock_budgets:
            flags = (*base.serve_flags, "--max-num-batched-tokens", str(max(budget, options.max_num_seqs)))
            entries.append((f"stock {budget}", replace(base, serve_flags=flags)))
    if "ours" in options.systems:
        target = options.target if options.ours_target is None else options.ours_target
        flags = (*base.serve_flags, *(("--target-tps-per-user", f"{target:g}") if target else ()))
        entries.append((f"ours, target {target:g}", replace(base, system="ours", serve_flags=flags)))
    return entries


@contextmanager
def _servers(entries: list[tuple[str, EngineOptions]], folder: Path, timeout_s: float) -> Iterator[dict[str, str]]:
    """Start servers side by side, one after the other; yield base addresses by label."""
    with ExitStack() as stack:
        addresses = {}
        for label, entry in entries:
            console().print(f"starting {label}")
            addresses[label] = stack.enter_context(server(entry, folder, timeout_s))[0]
        yield addresses


def _replay(address: str, label: str, load: int, options: argparse.Namespace) -> dict[str, Any]:
    trace = open_trace(options.trace, shape_of(options, load, ramp_s=max(0.1, options.warm / 2)))
    facts = {"system": label, "target_tps": options.target, "num_gpus": 1, "num_sessions": load}
    path = None
    if options.records is not None:
        options.records.mkdir(parents=True, exist_ok=True)
        path = options.records / f"{label.replace(', ', '-').replace(' ', '-')}-{load}.jsonl"
    wanted = ReplayOptions(
        options.seconds, options.warm, options.target, first_token=_FIRST_TOKEN, num_token_kinds=_TOKEN_KINDS
    )
    file = RecordFile(path, facts)
    replay = Replay(Target(address, "benchmark"), trace, wanted, file)
    failure = ""
    try:
        run_replay(replay, progress=sys.stderr.isatty())
    except ServerFailsError as error:
        failure = str(error)
        print(f"error: {label}: {error}", file=sys.stderr)
    finally:
        file.close()
    figures = replay.figures()
    print(f"{label}, {load} sessions: {figures['tokens_per_s_per_gpu']:.0f} tokens/s", file=sys.stderr, flush=True)
    return {**figures, "failure": failure, "system": label, "num_sessions": load}


def _outcomes(figures: dict[str, dict[str, Any]], options: argparse.Namespace) -> list[Outcome]:
    def failed(system: str) -> float:
        of_system = [one for label, one in figures.items() if label.startswith(system) and "failed" in one]
        if not of_system:
            raise MissingFigureError(f"no replay against {system}")
        return float(sum(one["failed"] + bool(one["failure"]) for one in of_system))

    return [Bar(f"{s}: turns that failed", "<=", 0.0, lambda s=s: failed(s)).judge() for s in options.systems]
