# SPDX-License-Identifier: Apache-2.0
"""Agentic traffic: ``python -m benchmarks.agentic {simulate,replay,bench,engines,predict,report} --help``."""

from __future__ import annotations

import argparse
import sys

from benchmarks.agentic import bench, engines, predict, replay, report, simulate
from benchmarks.agentic.loaders import TraceError
from benchmarks.agentic.records import RecordError
from benchmarks.agentic.step_time import StepModelError

_PARTS = {
    "simulate": (simulate, "real schedulers on a step-time model, tuning by tuning, against the bound"),
    "replay": (replay, "a trace against a server with OpenAI's completions over HTTP"),
    "bench": (bench, "stock and ours, each behind `vllm serve`, under the same replays"),
    "engines": (engines, "stock and ours side by side at the engine core, and the step-time data of a GPU"),
    "predict": (predict, "the simulator's figures for what engines measured, and its error"),
    "report": (report, "pictures and one HTML page of what simulate, replay and bench wrote"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a part; return the exit code, 2 for input that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agentic", description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, (module, summary) in _PARTS.items():
        module.add_options(parts.add_parser(name, help=summary, description=summary))
    options = parser.parse_args(arguments)
    try:
        return _PARTS[options.part][0].run(options)
    except (TraceError, StepModelError, RecordError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
