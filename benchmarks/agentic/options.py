# SPDX-License-Identifier: Apache-2.0
"""Options that all parts share: which trace, and in what shape."""

from __future__ import annotations

import argparse
import sys

from benchmarks.agentic.shaping import SYNTHETIC, Shape


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose and scale a trace."""
    parser.add_argument(
        "--trace",
        default=SYNTHETIC,
        help="synthetic, a path, or a name in the folder $TOKENSPEED_TRACES: a folder of coding-agent sessions, "
        ".json (one session), .jsonl (Mooncake), .csv (Azure), also with .gz",
    )
    parser.add_argument("--rate", type=float, default=1.0, help="divides recorded waits")
    parser.add_argument("--length", type=float, default=1.0, help="multiplies prompts; shared parts stay shared")
    parser.add_argument("--output-length", type=float, default=1.0, help="multiplies answers")
    parser.add_argument("--most-gap", type=float, default=60.0, help="longest wait between turns, seconds")
    parser.add_argument("--most-tokens", type=int, default=131_072, help="leave out turns that are longer")
    parser.add_argument("--most-turns", type=int, default=0, help="turns per session; 0: all")
    parser.add_argument("--seed", type=int, default=0)


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """Add the option for more targets to judge by."""
    parser.add_argument(
        "--also-targets",
        type=float,
        nargs="*",
        default=[100.0],
        help="goodput and bars at these targets, too, from the same turns, tokens/s per user",
    )


def shape_of(options: argparse.Namespace, num_sessions: int = 0, ramp_s: float = 0.0) -> Shape:
    """Return the shape that was asked for. Raises TraceError naming an option that cannot be."""
    return Shape(
        num_sessions=num_sessions,
        rate=options.rate,
        length=options.length,
        output_length=options.output_length,
        most_gap_s=options.most_gap,
        most_tokens=options.most_tokens,
        most_turns=options.most_turns,
        ramp_s=ramp_s,
        seed=options.seed,
    )


def command_line() -> str:
    """What was typed, without the place of results: it goes into files that others read."""
    words = sys.argv[1:]
    if "--out" in words:
        place = words.index("--out")
        del words[place : place + 2]
    return " ".join(["python -m benchmarks.agentic", *words])
