# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own: builds it from the options on its first input line, then obeys commands.

``python -m benchmarks.gpu.engine_process``: JSON lines in (``EngineOptions``, then ``{"command": NAME, ...}``),
one JSON line out for each.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

from benchmarks.gpu.engine import EngineOptions, build_engine, describe, prepare_environment


def _answer(run: Any) -> str:
    try:
        return json.dumps(run())
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:800]})


def main() -> None:
    """Serve commands until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints to standard output
    options = EngineOptions(**json.loads(sys.stdin.readline()))
    prepare_environment(options)
    built: list[Any] = []

    def build() -> dict[str, Any]:
        start = time.perf_counter()
        built.append(build_engine(options))
        return {**describe(built[0]), "startup_s": time.perf_counter() - start}

    print(_answer(build), file=answers)
    if not built:
        return
    from benchmarks.agentic.engine_replay import sessions
    from benchmarks.agentic.step_shapes import reference_steps, returning_turns, step_shapes
    from benchmarks.gpu.measurements import COMMANDS
    from benchmarks.placed.measurements import collectives, graph_times, links, traces
    from benchmarks.served.measurements import COMMANDS as SERVED

    more = {
        "sessions": sessions,
        "step_shapes": step_shapes,
        "reference_steps": reference_steps,
        "returning_turns": returning_turns,
        "collectives": collectives,
        "links": links,
        "graph_times": graph_times,
        "traces": traces,
    }
    commands = {**COMMANDS, **SERVED, **more}
    for line in sys.stdin:
        request = json.loads(line)
        command = commands[request["command"]]
        print(_answer(lambda command=command, request=request: command(built[0], request)), file=answers)
    built[0].llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
