# SPDX-License-Identifier: Apache-2.0
"""Runs under callgrind: counts the instructions of `schedule` and `update_from_output` per configuration.

``valgrind --tool=callgrind --instr-atstart=no --collect-atstart=no python -m benchmarks.control.counted
--marks LIBRARY --system ours CELL ...`` leaves one dump per cell, labelled with the cell and its step count.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses

from benchmarks.control.brackets import bracket_calls
from benchmarks.control.cells import parse_cell
from benchmarks.control.driver import settle
from benchmarks.control.systems import SCHEDULER_CLASSES, load_factory
from benchmarks.control.workloads import steady_decode

COUNTED_STEPS = 32
"""A multiple of the block of 16 tokens: every request starts the same number of blocks in each configuration."""


def label_of(cell: str) -> str:
    """Return the label of a cell's dump."""
    return f"cell {cell}"


def main() -> None:
    """Count every cell of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--marks", required=True, help="shared library of callgrind_marks.c")
    parser.add_argument("--system", choices=sorted(SCHEDULER_CLASSES), required=True)
    parser.add_argument("cells", nargs="+")
    arguments = parser.parse_args()
    marks = ctypes.CDLL(arguments.marks)

    def toggle(_call: str) -> None:
        marks.toggle_collect()

    make = load_factory(arguments.system)
    for text in arguments.cells:
        shape = dataclasses.replace(parse_cell(text).shape, num_steps=COUNTED_STEPS)
        driver = steady_decode(make, shape)
        settle()
        bracket_calls(driver.plane.scheduler, toggle, toggle)  # type: ignore[attr-defined]
        marks.start_instrumentation()
        driver.step()  # the translator's first pass over the code is not a step like the others
        marks.zero_stats()
        for _ in range(COUNTED_STEPS):
            driver.step()
        marks.dump_stats(label_of(text).encode())
        marks.stop_instrumentation()


if __name__ == "__main__":
    main()
