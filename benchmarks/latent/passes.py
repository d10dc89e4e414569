# SPDX-License-Identifier: Apache-2.0
"""Passes over the cells of a benchmark's parts, within a time limit: the machine drifts, so no cell is timed at one moment only."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenspeed_plugin.kernels.mla.solutions import SETTING

REPLAYS = 4
"""Timed replays of a graph in one pass."""


@dataclass
class Part:
    """Cells that are timed one after the other in each pass.

    Args:
        name: what the command line calls it.
        cells: in the order in which they are timed.
        measure: times all implementations on a cell; the pass counts from 0.
    """

    name: str
    cells: Sequence[Any]
    measure: Callable[[Any, int], None]
    seconds: list[float] = field(default_factory=list)
    """Of each complete pass."""
    note: str = ""
    """Why there are fewer passes than were asked for."""

    def report(self) -> dict[str, Any]:
        """What the JSON file says about it."""
        return {"cells": len(self.cells), "passes": len(self.seconds), "seconds": self.seconds, "note": self.note}


def run_passes(
    parts: Sequence[Part],
    passes: int,
    total_seconds: float,
    after_pass: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """All parts once, then all parts again, until the passes are done or the next one would end after the limit.

    The first pass of a part is begun in any case, and ends with the cell in which the limit passes; later ones are whole or are not begun.
    """
    began = clock()
    for number in range(passes):
        for part in parts:
            if part.note:
                continue
            start = clock()
            if number > 0 and start - began + max(part.seconds) > total_seconds:
                part.note = f"{number} of {passes} passes within {total_seconds:.0f} s"
                continue
            for done, cell in enumerate(part.cells):
                if number == 0 and clock() - began > total_seconds:
                    part.note = f"{done} of {len(part.cells)} cells within {total_seconds:.0f} s"
                    break
                part.measure(cell, number)
            else:
                part.seconds.append(clock() - start)
            after_pass()


def settle_us(floor_us: float) -> float:
    """Device time for which a decode graph runs before it is timed.

    Without it times of calls over 100 microseconds differed by up to 18% between passes, mostly by their direction, and those of
    shorter ones by up to 6%.
    """
    return 100_000.0 if floor_us > 30 else 10_000.0


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """The order of a pass: forwards and backwards by turns, so that what warms up in between is not always on the same one."""
    return list(names) if number % 2 == 0 else list(reversed(names))


def settled_us(replay_us: Callable[[], float], settle_us: float) -> float:
    """The median of REPLAYS replays, after others of the same for `settle_us`.

    What keeps all matrix units busy is faster or slower by what kept the GPU busy before: the same code was 13% faster behind one
    implementation than behind another. So each is timed behind itself.
    """
    ran_us = 0.0
    while ran_us < settle_us:
        ran_us += replay_us()
    return statistics.median(replay_us() for _ in range(REPLAYS))


def medians(passes_us: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Microseconds by implementation, the median over the passes in which it ran; of several settings, the best one's median."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for times_us in passes_us for name in times_us):
        median = statistics.median(times[name] for times in passes_us if name in times)
        implementation = name.partition(SETTING)[0]
        found[implementation] = min(median, found.get(implementation, median))
    return found
