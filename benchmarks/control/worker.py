# SPDX-License-Identifier: Apache-2.0
"""Worker process of one system: imports once, then runs each cell in a fork of its own.

``python -m benchmarks.control.worker --system NAME --core N`` reads one JSON request a line from standard input
(``{"cell": "decode:N=256,bs=64"}``) and writes one JSON line per request to standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from typing import Any, TextIO

from benchmarks.control.cells import parse_cell
from benchmarks.control.driver import PlaneFactory
from benchmarks.control.systems import SYSTEMS, load_factory


def run_cell(make: PlaneFactory, request: dict[str, Any]) -> dict[str, Any]:
    """Run the requested cell; return its statistics, or the error that stopped it."""
    try:
        if request.get("profile"):
            from benchmarks.control.profile import profile_decode

            return profile_decode(make, parse_cell(request["cell"]))
        return dict(parse_cell(request["cell"]).run(make))
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def run_forked(make: PlaneFactory, request: dict[str, Any]) -> str:
    """Run a cell in a child process and return its JSON line."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        with os.fdopen(write_end, "w") as pipe:
            json.dump(run_cell(make, request), pipe)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if not answer:
        return json.dumps({"error": f"the cell's process ended with {os.waitstatus_to_exitcode(status)}"})
    return answer


def _answers() -> TextIO:
    """Return the real standard output; whatever else prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def main() -> None:
    """Serve cells until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    parser.add_argument("--core", type=int, help="CPU core to pin this process to")
    arguments = parser.parse_args()
    answers = _answers()
    if arguments.core is not None:
        os.sched_setaffinity(0, {arguments.core})
    make = load_factory(arguments.system)
    print(json.dumps({"ready": arguments.system}), file=answers)
    for line in sys.stdin:
        print(run_forked(make, json.loads(line)), file=answers)


if __name__ == "__main__":
    main()
