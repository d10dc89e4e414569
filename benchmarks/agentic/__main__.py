# SPDX-License-Identifier: Apache-2.0
"""Agentic traffic: ``python -m benchmarks.agentic {simulate,replay,bench,engines,predict,report} --help``."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

_PARTS = {
    "simulate": "real schedulers on a step-time model, tuning by tuning, against the bound",
    "replay": "a trace against a server with OpenAI's completions over HTTP",
    "bench": "stock and ours, each behind `vllm serve`, under the same replays",
    "engines": "stock and ours side by side at the engine core, and the step-time data of a GPU",
    "predict": "the simulator's figures for what engines measured, and its error",
    "report": "pictures and one HTML page of what simulate, replay and bench wrote",
}


def main(arguments: list[str] | None = None) -> int:
    """Run a part; return the exit code, 2 for input that cannot be used.

    Only the part that is asked for is imported: a GPU machine need not have what the others need.
    """
    given = sys.argv[1:] if arguments is None else arguments
    asked = next((name for name in given if name in _PARTS), "")
    module = import_module(f"benchmarks.agentic.{asked}") if asked else None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agentic", description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, summary in _PARTS.items():
        one = parts.add_parser(name, help=summary, description=summary)
        if module is not None and name == asked:
            module.add_options(one)
    options = parser.parse_args(given)
    from benchmarks.agentic.loaders import TraceError
    from benchmarks.agentic.records import RecordError
    from benchmarks.agentic.step_time import StepModelError

    assert module is not None  # or the parser would have ended
    try:
        code: int = module.run(options)
        return code
    except (TraceError, StepModelError, RecordError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
