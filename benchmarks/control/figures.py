# SPDX-License-Identifier: Apache-2.0
"""Figures of a run: per cell and system, the median over the reps of each statistic."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from benchmarks.report import MissingFigureError

Reps = list[dict[str, Any]]


def medians(reps: Reps) -> dict[str, float]:
    """Return the median over the reps of each number; of ``step_max_us`` the maximum."""
    keys = [k for k, value in reps[0].items() if isinstance(value, (int, float)) and all(k in rep for rep in reps)]
    result = {key: float(statistics.median(rep[key] for rep in reps)) for key in keys}
    if "step_max_us" in result:
        result["step_max_us"] = float(max(rep["step_max_us"] for rep in reps))
    for key in ("step_p50_us", "step_p99_us"):  # work moved to another thread is still paid for
        if key in result:
            result[key] += result.get("other_threads_us_per_step", 0.0)
    return result


@dataclass
class Figures:
    """All reps of all cells, with the reasons for what is missing."""

    reps: dict[str, dict[str, Reps]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    instructions: dict[str, float] = field(default_factory=dict)
    """Instructions per step of ours by configuration; empty when they were not counted."""

    def of(self, system: str, cell: str) -> dict[str, float]:
        """Return the medians of a system in a cell; raise MissingFigureError that says why there are none."""
        if system in self.missing:
            raise MissingFigureError(f"{system} {self.missing[system]}")
        reps = self.reps.get(cell, {}).get(system)
        if not reps:
            raise MissingFigureError(f"{cell} was not run on {system}")
        for rep in reps:
            if "error" in rep:
                raise MissingFigureError(f"{system} failed {cell}: {rep['error']}")
        return medians(reps)

    def value(self, system: str, cell: str, statistic: str) -> float:
        """Return one median; raise MissingFigureError where the cell has no such statistic."""
        statistics_of_cell = self.of(system, cell)
        if statistic not in statistics_of_cell:
            raise MissingFigureError(f"{system} has no {statistic} in {cell}")
        return statistics_of_cell[statistic]

    def ratio(self, cell: str, statistic: str, ours: str, peer: str) -> float:
        """Return ours over the peer's."""
        return self.value(ours, cell, statistic) / self.value(peer, cell, statistic)

    def as_json(self) -> dict[str, Any]:
        """Return everything measured."""
        return {
            "not_installed": self.missing,
            "instructions_per_step": self.instructions,
            "cells": self.reps,
        }
