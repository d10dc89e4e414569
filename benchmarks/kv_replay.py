# SPDX-License-Identifier: Apache-2.0
"""How much an eviction policy computes again: traces with their real gaps against pools that are too small for them.

Every request is looked up, what is missing is computed, and its blocks are given back at once. Figures are blocks that had been
computed before and were computed again; pools are shares of the distinct blocks of the trace.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.kvreplay import systems
from benchmarks.kvreplay.bars import POOL_SHARES, Cell, all_bars, gap_closed
from benchmarks.kvreplay.optimum import Optimum
from benchmarks.kvreplay.trace import Trace, coding_agent, mooncake
from benchmarks.report import exit_code, print_outcomes, print_table, write_json
from tokenspeed_plugin.scheduler_fsm import _core

SEEDS = (1, 2, 3)
BLOCK_TOKENS = 128
_SYSTEMS = ("stock", "lru", "ours", "ours_hints", "oracle", "belady")


def cells_of(trace: Trace, seed: int, shares: Sequence[float], with_stock: bool) -> list[Cell]:
    """Replay a trace against every system.

    Args:
        trace: what is replayed.
        seed: with which its sessions were started.
        shares: pools, as shares of its distinct blocks.
        with_stock: run vLLM's block pool, which is Python, too.
    """
    optimum = Optimum(trace)
    prompts = systems.prepared(trace)
    lru, ours = _core.EvictionSpec(name="lru"), _core.EvictionSpec()
    cells = []
    for share in shares:
        capacity = int(share * trace.num_blocks)
        cell = Cell(trace.name, seed, share)
        figures = cell.num_recomputed
        if with_stock:
            figures["stock"] = systems.stock_recomputed(trace, capacity)
        figures["lru"] = systems.flat_recomputed(trace, prompts, capacity, lru)
        figures["ours"] = systems.flat_recomputed(trace, prompts, capacity, ours)
        if trace.has_sessions:
            figures["ours_hints"] = systems.flat_recomputed(trace, prompts, capacity, ours, systems.agent_hints())
            figures["oracle"] = systems.flat_recomputed(trace, prompts, capacity, ours, systems.perfect_hints)
        figures["belady"] = optimum.num_recomputed_blocks(capacity)
        cells.append(cell)
    return cells


def print_cells(cells: Sequence[Cell]) -> None:
    """Print every cell, and what the seeds together say."""
    rows = [
        (
            f"{cell.trace}, seed {cell.seed}, pool {cell.pool_share:.0%}",
            *(f"{cell.num_recomputed[name]:,}" if name in cell.num_recomputed else "-" for name in _SYSTEMS),
        )
        for cell in cells
    ]
    print_table("Blocks computed again", ("trace", *_SYSTEMS), rows)
    gaps = []
    for trace in dict.fromkeys(cell.trace for cell in cells):
        for share in POOL_SHARES:
            group = [cell for cell in cells if cell.trace == trace and cell.pool_share == share]
            names = [name for name in ("ours", "ours_hints", "oracle") if group and name in group[0].num_recomputed]
            if names:
                closed = {name: f"{gap_closed(group, name):.1%}" for name in names}
                gaps.append(
                    (f"{trace}, pool {share:.0%}", *(closed.get(n, "-") for n in ("ours", "ours_hints", "oracle")))
                )
    print_table(
        "Gap between LRU and Belady's optimum closed, all seeds", ("trace", "ours", "ours_hints", "oracle"), gaps
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_replay", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, without the conversation trace")
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        metavar="N",
        help=f"how sessions of coding agents are spread over the hour (default: {' '.join(map(str, SEEDS))})",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is not met")
    options = parser.parse_args(arguments)
    folder = os.environ.get("TOKENSPEED_TRACES")
    if not folder:
        parser.error("TOKENSPEED_TRACES is not set; it must name the folder with the traces (see benchmarks/README.md)")
    cells = []
    seeds = options.seeds or (SEEDS[:1] if options.quick else SEEDS)
    for seed in seeds:
        trace = coding_agent(Path(folder), BLOCK_TOKENS, seed)
        cells += cells_of(trace, seed, POOL_SHARES, with_stock=seed == seeds[0])
    for kind in ("synthetic",) if options.quick else ("synthetic", "conversation"):
        cells += cells_of(mooncake(Path(folder), kind), 0, POOL_SHARES, with_stock=True)
    print_cells(cells)
    outcomes = [bar.judge() for bar in all_bars(cells)]
    print_outcomes(outcomes)
    write_json(options.json, {"cells": [asdict(cell) for cell in cells]}, outcomes)
    return exit_code(outcomes, options.check)


if __name__ == "__main__":
    sys.exit(main())
