# SPDX-License-Identifier: Apache-2.0
"""Cost of three control planes in one run: vLLM's scheduler, tokenspeed-scheduler 0.1.42 and ours.

``python -m benchmarks.control_plane [--quick] [--check] [--json FILE] [--reps 5] [--async] [--profile]
[--cells CELL ...]``. Every system runs in a process of its own, pinned to one core, cell by cell and rep by rep
in turn, on thread CPU time (``BENCH_CLOCK=wall`` for wall time). For vLLM's interface the timed region is
`schedule` and `update_from_output` with every object they return; for tokenspeed-scheduler it is plan, the
reading of what a runtime needs, the building of events, and advance.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.control import bars
from benchmarks.control.bars import Contest
from benchmarks.control.cells import parse_cell
from benchmarks.control.figures import Figures
from benchmarks.control.fleet import start_fleet
from benchmarks.control.instructions import (
    CountingUnavailableError,
    hottest_functions,
    instructions_per_step,
    run_callgrind,
)
from benchmarks.control.tables import print_cells, print_instructions
from benchmarks.report import console, exit_code, print_outcomes, print_table, write_json

PROFILED_CELL = "decode:N=256,bs=64,steps=128"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line; a bad cell ends the process with its name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few cells, 2 reps, no instruction counts")
    parser.add_argument("--check", action="store_true", help="exit with 1 and name every bar that is not met")
    parser.add_argument("--json", metavar="FILE", help="write all figures and bars to FILE")
    parser.add_argument("--reps", type=int, help="repetitions of each cell (default 5, quick 2)")
    parser.add_argument("--cells", nargs="+", help="run these cells only")
    parser.add_argument("--async", action="store_true", dest="depth_two", help="async scheduling, depth 2")
    parser.add_argument("--profile", action="store_true", help="show where the time of ours goes, and end")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="core to pin to")
    parser.add_argument("--no-instructions", action="store_true", help="do not count instructions")
    parsed = parser.parse_args(arguments)
    try:
        for cell in parsed.cells or ():
            parse_cell(cell)
    except ValueError as error:
        parser.error(str(error))
    return parsed


def contest_of(depth_two: bool) -> Contest:
    """Return the systems to compare; tokenspeed-scheduler is always driven synchronously."""
    return Contest("ours-async", "vllm-async") if depth_two else Contest()


def cells_of(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the cells to run; preemption at depth 2 drops tokens in flight, so pressure cells are synchronous."""
    cells = tuple(options.cells or (bars.QUICK_CELLS if options.quick else bars.FULL_CELLS))
    if options.depth_two and not options.cells:
        cells = tuple(cell for cell in cells if cell not in (bars.PRESSURE, bars.AGENTIC_PRESSURE))
    return cells


def measure(options: argparse.Namespace, contest: Contest, cells: tuple[str, ...], folder: Path) -> Figures:
    """Run every cell on every system."""
    figures = Figures()
    num_reps = options.reps or (2 if options.quick else 5)
    systems = (contest.vllm, contest.tokenspeed, contest.ours)
    with start_fleet(systems, options.core, folder) as fleet:
        figures.missing = fleet.missing
        for index, cell in enumerate(cells):
            start = time.monotonic()
            figures.reps[cell] = fleet.run_interleaved(cell, num_reps)
            seconds = time.monotonic() - start
            print(f"[{index + 1}/{len(cells)}] {cell}: {seconds:.0f} s", file=sys.stderr, flush=True)
    return figures


def count_instructions(figures: Figures, contest: Contest, cells: tuple[str, ...], folder: Path) -> None:
    """Count the instructions of ours for the cells whose cost must not change."""
    wanted = {bars.NOBODY_WAITS, bars.LONG_WAIT, bars.BASE, *bars.DOUBLED.values()}
    counted = [cell for cell in cells if cell in wanted]
    if not counted or contest.ours in figures.missing:
        return
    try:
        dumps = run_callgrind(contest.ours, counted, folder)
        figures.instructions = {cell: instructions_per_step(dump) for cell, dump in dumps.items()}
    except CountingUnavailableError as reason:
        print(f"instructions not counted, CPU time is used instead: {reason}", file=sys.stderr)


def print_profile(contest: Contest, core: int, folder: Path) -> int:
    """Print the Python and the native profile of a decode step of ours."""
    with start_fleet((contest.ours,), core, folder) as fleet:
        if contest.ours not in fleet.workers:
            print(f"{contest.ours}: {fleet.missing[contest.ours]}", file=sys.stderr)
            return 1
        profile = fleet.workers[contest.ours].run(PROFILED_CELL, profile=True)
    if "error" in profile:
        print(profile["error"], file=sys.stderr)
        return 1
    for call, rows in profile["calls"].items():
        table = [
            (row["function"], f"{row['share']:.1%}", f"{row['us_per_step']:.1f}", f"{row['calls_per_step']:.1f}")
            for row in rows
        ]
        print_table(f"{call}, {PROFILED_CELL} (cProfile)", ("function", "share", "us/step", "calls/step"), table)
    for name, floor_us in profile["floor_us"].items():
        console().print(f"floor of {name}, its objects built in C alone: {floor_us:.1f} us per step")
    try:
        dump = run_callgrind(contest.ours, [PROFILED_CELL], folder)[PROFILED_CELL]
    except CountingUnavailableError as reason:
        print(f"no native profile: {reason}", file=sys.stderr)
        return 0
    rows = [(name, f"{share:.1f}%") for share, name in hottest_functions(dump, 25)]
    print_table(f"{instructions_per_step(dump):,.0f} instructions per step (callgrind)", ("function", "share"), rows)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    options = parse_arguments(arguments)
    contest = contest_of(options.depth_two)
    cells = cells_of(options)
    with tempfile.TemporaryDirectory(prefix="control-plane-") as name:
        folder = Path(name)
        if options.profile:
            return print_profile(contest, options.core, folder)
        figures = measure(options, contest, cells, folder)
        if not (options.quick or options.no_instructions):
            count_instructions(figures, contest, cells, folder)
    print_cells(figures, contest, cells)
    print_instructions(figures, bars.BASE, {what: cell for what, cell in bars.DOUBLED.items() if cell in cells})
    print_instructions(figures, bars.NOBODY_WAITS, {"4 prompts of 64K wait for memory": bars.LONG_WAIT})
    known = bars.all_bars(figures, contest)
    chosen = [entry.bar.judge() for entry in known if set(entry.cells) <= set(cells)]
    print_outcomes(chosen)
    if len(chosen) < len(known):
        print(f"{len(known) - len(chosen)} bars belong to cells that this run leaves out")
    write_json(options.json, figures.as_json(), chosen)
    return exit_code(chosen, options.check)


if __name__ == "__main__":
    sys.exit(main())
