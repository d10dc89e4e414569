# SPDX-License-Identifier: Apache-2.0
"""Where the time of a decode step goes: Python functions by cProfile, and the floor of the payload objects."""

from __future__ import annotations

import cProfile
import pstats
import time
from typing import Any

from benchmarks.control.brackets import MEASURED_CALLS, bracket_calls
from benchmarks.control.cells import Cell
from benchmarks.control.driver import PlaneFactory
from benchmarks.control.object_floor import object_floor_us
from benchmarks.control.workloads import DecodeShape, steady_decode

_ROWS = 12


def profile_decode(make: PlaneFactory, cell: Cell) -> dict[str, Any]:
    """Profile the steps of a decode cell; return rows per measured call and the object floor in microseconds."""
    if not isinstance(cell.shape, DecodeShape):
        raise TypeError(f"cell {cell.text!r}: only decode cells can be profiled")
    driver = steady_decode(make, cell.shape)
    scheduler = getattr(driver.plane, "scheduler", None)
    if scheduler is None:
        raise TypeError(f"{driver.plane.name} has no Python inside its calls to profile")
    profiles = {name: cProfile.Profile(time.thread_time_ns, 1e-9) for name in MEASURED_CALLS}
    bracket_calls(scheduler, lambda name: profiles[name].enable(), lambda name: profiles[name].disable())
    for _ in range(cell.shape.num_steps):
        driver.step()
    return {
        "calls": {name: _rows(profile, cell.shape.num_steps) for name, profile in profiles.items()},
        "floor_us": object_floor_us(cell.shape.num_requests),
    }


def _rows(profile: cProfile.Profile, num_steps: int) -> list[dict[str, Any]]:
    """Return the functions with the largest own time: share of the call, microseconds and calls per step."""
    entries = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    total_s = sum(entry[2] for entry in entries.values()) or 1.0
    costliest = sorted(entries.items(), key=lambda item: -item[1][2])[:_ROWS]
    return [
        {
            "function": f"{file.rpartition('/')[2]}:{line} {name}" if line else name,
            "share": own_s / total_s,
            "us_per_step": own_s / num_steps * 1e6,
            "calls_per_step": num_calls / num_steps,
        }
        for (file, line, name), (_, num_calls, own_s, _, _) in costliest
    ]
