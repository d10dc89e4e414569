# SPDX-License-Identifier: Apache-2.0
"""Engines measured in turns, so that what drifts with time meets all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.engine_client import EngineFailedError, EngineProcess


@dataclass(frozen=True)
class Cell:
    """What is asked; `name` is its key among the figures."""

    name: str
    request: dict[str, Any]
    command: str = "decode_sessions"


@dataclass
class Measured:
    """Figures of one engine by cell, medians over reps beside all reps; `error` when it failed on the way."""

    by_cell: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: str = ""


def in_turns(
    running: Mapping[str, EngineProcess],
    cells: Sequence[Cell],
    num_reps: int,
    output_tokens: int,
    *,
    idle_s: float,
    deadline: float,
) -> dict[str, Measured]:
    """Ask all cells of all engines, rep by rep.

    The order of the engines turns round with each rep, and the first rep only warms up. No rep is begun past the deadline,
    but two are always made, so that there are figures.

    Args:
        running: the engines.
        cells: what each of them is asked.
        num_reps: reps that count.
        output_tokens: decode steps of a cell.
        idle_s: pause before an engine's turn.
        deadline: by `time.monotonic`.
    """
    reps: dict[str, dict[str, list[dict[str, float]]]] = {name: {} for name in running}
    measured = {name: Measured() for name in running}
    for rep in range(num_reps + 1):
        if rep > 1 and time.monotonic() > deadline:
            break
        names = [name for name in running if not measured[name].error]
        for name in names if rep % 2 else reversed(names):
            time.sleep(idle_s)
            for cell in cells:
                try:
                    found = running[name].run(cell.command, round=rep, output_tokens=output_tokens, **cell.request)
                except EngineFailedError as error:
                    measured[name].error = str(error)
                    break
                if rep:
                    reps[name].setdefault(cell.name, []).append(found)
    for name, by_cell in reps.items():
        measured[name].by_cell = {cell: summary(found) for cell, found in by_cell.items()}
    return measured


def summary(reps: list[dict[str, float]]) -> dict[str, Any]:
    """The median of each figure, and the reps."""
    names = {name for rep in reps for name in rep}
    medians = {name: statistics.median(rep[name] for rep in reps if name in rep) for name in sorted(names)}
    return medians | {"reps": reps}
