# SPDX-License-Identifier: Apache-2.0
"""Agentic traffic: ``python -m benchmarks.agentic {simulate,replay,report} --help``."""

from __future__ import annotations

import argparse
import sys

from benchmarks.agentic import simulate
from benchmarks.agentic.loaders import TraceError
from benchmarks.agentic.step_time import StepModelError

_PARTS = {
    "simulate": (simulate, "real schedulers on a step-time model, tuning by tuning, against the bound"),
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
    except (TraceError, StepModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
