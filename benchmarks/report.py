# SPDX-License-Identifier: Apache-2.0
"""What every benchmark prints: bars met and missed, the machine, JSON, and the exit code of ``--check``."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table


class MissingFigureError(LookupError):
    """A figure that a bar needs was not measured; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """A bar held against its figure."""

    claim: str
    relation: str
    limit: float
    measured: float | None
    met: bool
    note: str = ""

    def __str__(self) -> str:
        figure = self.note if self.measured is None else f"{self.measured:.3g}"
        return f"{self.claim}: {figure} (must be {self.relation} {self.limit:.3g})"


@dataclass(frozen=True)
class Bar:
    """A claim with its limit; `figure` raises MissingFigureError when something it needs was not measured."""

    claim: str
    relation: Literal["<=", ">=", "<"]
    limit: float
    figure: Callable[[], float]

    def judge(self) -> Outcome:
        """Hold the bar against its figure; what was not measured or is no number is not met."""
        try:
            measured = self.figure()
        except MissingFigureError as missing:
            return Outcome(self.claim, self.relation, self.limit, None, False, f"not checked: {missing}")
        if math.isnan(measured):
            return Outcome(self.claim, self.relation, self.limit, None, False, "not a number")
        met = {
            "<=": measured <= self.limit,
            "<": measured < self.limit,
            ">=": measured >= self.limit,
        }[self.relation]
        return Outcome(self.claim, self.relation, self.limit, measured, met)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is text, the others are figures."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def console() -> Console:
    """Return a console that does not cut tables when the output is a file."""
    return Console(width=None if sys.stdout.isatty() else 180)


def print_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Print every bar beside its figure."""
    rows = [
        (
            outcome.claim,
            outcome.note if outcome.measured is None else f"{outcome.measured:.3g}",
            f"{outcome.relation} {outcome.limit:.3g}",
            "met" if outcome.met else "NOT MET",
        )
        for outcome in outcomes
    ]
    print_table("Bars", ("claim", "measured", "bar", "result"), rows)


def exit_code(outcomes: Sequence[Outcome], check: bool) -> int:
    """Return the process's exit code; with `check`, print a line per bar not met and return 1 if there is one."""
    if not check:
        return 0
    missed = [outcome for outcome in outcomes if not outcome.met]
    for outcome in missed:
        print(f"bar not met: {outcome}")
    print(f"{len(outcomes) - len(missed)} of {len(outcomes)} bars met")
    return 1 if missed or not outcomes else 0


def machine() -> dict[str, Any]:
    """Return what a reader needs to judge figures: processor, cores, load, Python, time."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = (line for line in cpuinfo.read_text().splitlines() if line.startswith("model name"))
        model = next(lines, ":").partition(":")[2].strip() or model
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(sys.argv),
    }


def write_json(path: str | None, figures: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Write figures and bars to `path`; do nothing without one."""
    if path is None:
        return
    document = {"machine": machine(), **figures, "bars": [asdict(outcome) for outcome in outcomes]}
    Path(path).write_text(json.dumps(document, indent=1) + "\n")


class Progress:
    """A progress bar on standard error; nothing where that is no terminal or it is not `shown`."""

    def __init__(self, what: str, total: int, shown: bool = True) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = RichProgress(*columns, console=Console(stderr=True), disable=not shown)
        self._what = what
        self._total = total

    def __enter__(self) -> Progress:
        """Show the bar."""
        self._bar.start()
        self._task = self._bar.add_task(self._what, total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave it standing."""
        self._bar.stop()

    def advance(self, text: str) -> None:
        """Count one and say `text` beside the bar."""
        self._bar.update(self._task, advance=1, description=f"{self._what}: {text}")
