# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.agentic replay`: a trace against any server with OpenAI's completions over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from benchmarks.agentic.options import add_shape_options, shape_of
from benchmarks.agentic.records import RecordFile
from benchmarks.agentic.replayer import Replay, ReplayOptions, ServerFailsError, only_model
from benchmarks.agentic.replayer import replay as run_replay
from benchmarks.agentic.shaping import open_trace
from benchmarks.agentic.streaming import Target
from benchmarks.agentic.tables import print_replays
from benchmarks.report import Bar, console, exit_code, print_outcomes, write_json

_KEY_VARIABLE = "OPENAI_API_KEY"
_CLIENT_LIMIT = 0.85


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `replay`."""
    add_shape_options(parser)
    parser.add_argument("--base-url", required=True, help="the server, without /v1")
    parser.add_argument("--model", help="default: the first that the server names")
    parser.add_argument("--sessions", type=int, default=16, help="sessions at a time; 0: those of the trace")
    parser.add_argument("--ramp", type=float, default=5.0, help="seconds over which sessions start; 0: recorded starts")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop then; 0: play the trace to its end")
    parser.add_argument("--warm", type=float, default=0.0, help="seconds at the start that do not count")
    parser.add_argument("--target", type=float, default=70.0, help="tokens/s per user that goodput asks for")
    parser.add_argument("--num-gpus", type=int, default=1, help="GPUs behind the server")
    parser.add_argument("--first-token", type=int, default=1000, help="lowest token id of prompts")
    parser.add_argument("--token-kinds", type=int, default=7000, help="how many token ids prompts draw from")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds until an answer is given up")
    parser.add_argument("--out", type=Path, help="write JSON lines, a turn each, as they end")
    parser.add_argument("--quick", action="store_true", help="2 turns per session")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 when turns failed or miss the target")


def run(options: argparse.Namespace) -> int:
    """Replay, print, and return the exit code; 3 when the server stopped answering."""
    if options.quick:
        options.most_turns = 2
    trace = open_trace(options.trace, shape_of(options, options.sessions, options.ramp))
    console().print(trace.describe())
    key = os.environ.get(_KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    base_url = options.base_url.rstrip("/")
    try:
        model = options.model or asyncio.run(only_model(base_url, headers))
    except ServerFailsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    facts = {"system": base_url, "model": model, "target_tps": options.target, "num_gpus": options.num_gpus}
    facts |= {"num_sessions": len(trace.sessions), "trace": trace.describe()}
    file = RecordFile(options.out, facts)
    wanted = ReplayOptions(
        options.seconds,
        options.warm,
        options.target,
        options.num_gpus,
        options.first_token,
        options.token_kinds,
        options.timeout,
    )
    replay = Replay(Target(base_url, model, headers), trace, wanted, file)
    failure = ""
    try:
        run_replay(replay, progress=sys.stderr.isatty())
    except ServerFailsError as error:
        failure = str(error)
    finally:
        file.close()
    return _conclude(replay, failure, options)


def _conclude(replay: Replay, failure: str, options: argparse.Namespace) -> int:
    figures = replay.figures()
    print_replays({options.base_url: figures}, options.target)
    if figures["client_cpu_share"] > _CLIENT_LIMIT:
        print(
            f"warning: this client used {figures['client_cpu_share']:.2f} of a core and may be the limit",
            file=sys.stderr,
        )
    errors = sorted({record.error for record in replay.records if record.error})
    for error in errors[:5]:
        print(f"failed or cut: {error}", file=sys.stderr)
    target = options.target
    outcomes = [
        Bar("share of turns that failed", "<=", 0.0, lambda: figures["failed"] / max(1, figures["turns"])).judge(),
        Bar(f"tokens/s of 95% of turns, target {target:g}", ">=", target, lambda: float(figures["tps_p5"])).judge(),
    ]
    if options.check:
        print_outcomes(outcomes)
    write_json(options.json, {"figures": figures, "failure": failure}, outcomes)
    if failure:
        kept = f"; the {len(replay.records)} turns until then are in {options.out}" if options.out else ""
        print(f"error: {failure}{kept}", file=sys.stderr)
        return 3
    return exit_code(outcomes, options.check)
