# SPDX-License-Identifier: Apache-2.0
"""MLA on one Hopper GPU: ours, FlashMLA, FlashAttention 3 and Triton as vLLM has them, FP8 and the physical floor.

Decode first, then prefill on a cached prefix (`benchmarks.latent.prefill`).

``python -m benchmarks.mla [--quick] [--check] [--json FILE] [--peers DIR] [--heads H ...] [--queries Q ...]``. All run in
one process on the same inputs, in turn, each as a CUDA graph of 20 calls; the KV cache rotates over at least four times the
L2 cache. Planning kernels are left out for all; ours is reported by itself. ``--peers DIR`` names a folder with vLLM's shared
objects (`_flashmla_C`, `_flashmla_extension_C`, `_vllm_fa3_C`) for a machine on which vLLM itself cannot be imported.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.latent.cells import LARGE, LONG, SMALL, Cell, cells, geometric_mean
from benchmarks.latent.fp8 import Fp8Bench, fp8_bars, is_measured, table_rows
from benchmarks.latent.peers import PEERS, FlashMlaFp8, PeerUnavailableError
from benchmarks.latent.prefill import MeasuredPrefill, measure_prefills, print_prefills, worst_speedup
from benchmarks.latent.timing import Inputs, Sweep, copy_bytes_per_s
from benchmarks.report import Bar, MissingFigureError, exit_code, print_outcomes, print_table, write_json
from tokenspeed_plugin.kernels.autotune import TuningTable, load_tables
from tokenspeed_plugin.kernels.device import device_key, this_platform
from tokenspeed_plugin.kernels.graph_timing import time_us
from tokenspeed_plugin.kernels.mla.geometry import HEAD_DIMS, LATENT_DIMS
from tokenspeed_plugin.kernels.mla.sm90.decode import MlaDecodePlan, MlaWorkspace, mla_decode
from tokenspeed_plugin.kernels.mla.solutions import BENCHMARK_NAMES, BF16, decode_shape
from tokenspeed_plugin.kernels.registry import default_registry
from tokenspeed_plugin.kernels.select import KernelRequest, select_kernel

PAGE_TOKENS = 64
HEADS, QUERIES = (16, 32, 64, 128), (1, 2, 4)
QUICK_HEADS, QUICK_QUERIES = (16, 64, 128), (1,)
STOCK = ("FlashMLA", "FlashAttention 3")
OURS, SWEEP = "ours", "read-only sweep"


@dataclass
class Measured:
    """Microseconds of one cell by implementation, and the largest relative difference to another's output."""

    cell: Cell
    floor_us: float
    times_us: dict[str, float] = field(default_factory=dict)
    plan_us: float = 0.0
    difference: float = 0.0
    fp8_difference: float = 0.0

    @property
    def speedup(self) -> float:
        """The better of stock's over ours."""
        return min(self.stock_us().values()) / self.times_us[OURS]

    def auto_speedup(self, tuning: TuningTable) -> float:
        """The better of stock's over the kernel that selection picks, both of this run."""
        shape = decode_shape(
            self.cell.heads, self.cell.query_tokens, PAGE_TOKENS, self.cell.requests, self.cell.context_tokens
        )
        picked = select_kernel(KernelRequest("mla", "decode", BF16, shape, this_platform()), tuning=tuning)
        for name, solution in BENCHMARK_NAMES.items():
            if solution == picked.spec.solution and name in self.times_us:
                return min(self.stock_us().values()) / self.times_us[name]
        raise MissingFigureError(f"{self.cell}: {picked.spec.solution}, which auto picks, did not run")

    def stock_us(self) -> dict[str, float]:
        """Return the times of FlashMLA and FlashAttention 3; both must have run."""
        found = {name: self.times_us[name] for name in STOCK if name in self.times_us}
        if len(found) < len(STOCK):
            raise MissingFigureError(f"{self.cell}: {', '.join(n for n in STOCK if n not in found)} did not run")
        return found


class Bench:
    """Runs cells; peers that this machine lacks are named once and left out."""

    def __init__(self, folder: Path | None, pool_bytes: int) -> None:
        self.pool = torch.empty(pool_bytes // 2, dtype=torch.bfloat16, device="cuda").normal_()
        self.sweep = Sweep()
        self.peers, self.absent = [], {}
        for peer in PEERS:
            try:
                self.peers.append(peer(folder))
            except PeerUnavailableError as error:
                self.absent[peer.name] = str(error)  # type: ignore[attr-defined]
        self.fp8 = Fp8Bench(folder)
        if self.fp8.absent:
            self.absent[FlashMlaFp8.name] = self.fp8.absent
        self.bytes_per_s = self.copy_bandwidth()

    def copy_bandwidth(self) -> float:
        """Device-to-device copy, bytes read plus bytes written per second, the median of ten."""
        return copy_bytes_per_s(self.pool)

    def run(self, cell: Cell, with_sweep: bool = False) -> Measured:
        """Time all implementations on one cell."""
        inputs = Inputs(cell, PAGE_TOKENS, self.pool)
        measured = Measured(cell, cell.floor_us(self.bytes_per_s))
        measured.times_us[OURS], measured.plan_us, ours = time_ours(inputs)
        for peer in self.peers:
            try:
                measured.times_us[peer.name], theirs = peer.time_us(inputs)
            except PeerUnavailableError:
                continue
            difference = ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()
            measured.difference = max(measured.difference, difference)
        if with_sweep:
            measured.times_us[SWEEP] = self.sweep.time_us(inputs)
        if is_measured(cell):
            times_us, measured.fp8_difference = self.fp8.times_us(cell, PAGE_TOKENS)
            measured.times_us.update(times_us)
        return measured


def void(_: object) -> None:
    """Drops a result, so that a launch can stand where nothing may be returned."""


def time_ours(inputs: Inputs) -> tuple[float, float, torch.Tensor]:
    """Microseconds of decode and of planning, and the output on the first part of the KV cache."""
    cell, device = inputs.cell, inputs.q.device
    workspace = MlaWorkspace(cell.heads, cell.query_tokens, cell.requests, device)
    plans = [MlaDecodePlan(workspace, cell.requests) for _ in inputs.block_tables]
    for plan, table in zip(plans, inputs.block_tables, strict=True):
        plan.update(inputs.seq_lens, table, PAGE_TOKENS)
    q_nope, q_rope = inputs.q.split((LATENT_DIMS, HEAD_DIMS - LATENT_DIMS), dim=-1)
    out = torch.empty_like(q_nope, memory_format=torch.contiguous_format)
    lse = torch.empty(q_nope.shape[:2], dtype=torch.float32, device=device)

    def launch(call: int) -> None:
        mla_decode(q_nope, q_rope, inputs.kv_cache, plans[inputs.part(call)], inputs.scale, out=out, lse=lse)

    decode_us = time_us(launch)
    plan_us = time_us(lambda _: plans[0].update(inputs.seq_lens, inputs.block_tables[0], PAGE_TOKENS))
    launch(0)
    return decode_us, plan_us, out


@dataclass
class Claims:
    """The figures that the bars of the project's issue on kernels ask for."""

    small: list[Measured]
    large: list[Measured]
    long: list[Measured]
    prefills: list[MeasuredPrefill] = field(default_factory=list)
    no_prefills: str = ""

    def speedup(self, heads: int, queries: int) -> float:
        """Geometric mean over the small batches of a fold."""
        rows = [m for m in self.small if (m.cell.heads, m.cell.query_tokens) == (heads, queries)]
        return geometric_mean([m.speedup for m in rows])

    def against_sweep(self) -> float:
        """Time at H16 q1 B1 L64K over that of reading the same bytes."""
        for m in self.small:
            if m.cell == Cell(16, 1, 1, 65536) and SWEEP in m.times_us:
                return m.times_us[OURS] / m.times_us[SWEEP]
        raise MissingFigureError("H16 q1 B1 L64K was not run")

    def growth(self) -> float:
        """Largest time per KV byte at long contexts over that at 128K."""
        if not self.long:
            raise MissingFigureError("contexts of 128K to 1M were not run")
        per_byte = [m.times_us[OURS] / m.cell.kv_bytes for m in self.long]
        return max(per_byte) / per_byte[0]

    def worst_large(self) -> float:
        """Smallest speed-up of our kernel at large batches."""
        if not self.large:
            raise MissingFigureError("large batches were not run")
        return min(m.speedup for m in self.large)

    def worst_auto(self) -> float:
        """Smallest speed-up of what selection picks at large batches."""
        if not self.large:
            raise MissingFigureError("large batches were not run")
        tuning = load_tables(device_key(this_platform().name, default_registry()))
        return min(m.auto_speedup(tuning) for m in self.large)

    def bars(self, folds: list[tuple[int, int]]) -> list[Bar]:
        """All bars, none softened; what there is no kernel for is not met."""
        return [
            *(
                Bar(f"H {h}, q {q}: geometric mean speed-up over small batches", ">=", 1.3, partial(self.speedup, h, q))
                for h, q in folds
            ),
            Bar("large batches: worst speed-up of our kernel", ">=", 0.95, self.worst_large),
            Bar("large batches: worst speed-up of what auto picks", ">=", 0.98, self.worst_auto),
            Bar("H16 q1 B1 L64K: time over a read-only sweep", "<=", 1.3, self.against_sweep),
            Bar("H16 q1 B1: time per KV byte, 128K to 1M", "<=", 1.05, self.growth),
            *fp8_bars([*self.small, *self.large]),
            Bar(
                "prefill on a cached prefix over stock: worst speed-up",
                ">=",
                1.1,
                partial(worst_speedup, self.prefills, self.no_prefills),
            ),
        ]


def print_cells(measured: list[Measured]) -> None:
    """Print one line per cell."""
    names = (OURS, *STOCK, "Triton (vLLM)", SWEEP)
    rows = []
    for m in measured:
        ratio = f"{m.speedup:.2f}" if all(n in m.times_us for n in STOCK) else "-"
        times = [f"{m.times_us[n]:.1f}" if n in m.times_us else "-" for n in names]
        rows.append((str(m.cell), f"{m.floor_us:.1f}", *times, ratio, f"{m.plan_us:.1f}", f"{m.difference:.1e}"))
    columns = ("cell", "floor", *names, "speed-up", "our plan", "difference")
    print_table("MLA decode, bf16, page 64, microseconds", columns, rows)
    columns = ("cell", "ours, FP8", "FlashMLA, FP8", "ours, bf16", "over bf16", "over FlashMLA")
    print_table("MLA decode, e4m3, page 64, microseconds", columns, table_rows(measured))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer heads and query counts, no long contexts")
    parser.add_argument("--check", action="store_true", help="exit with 1 and name every bar that is not met")
    parser.add_argument("--json", metavar="FILE", help="write all figures and bars to FILE")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="folder with vLLM's shared objects")
    parser.add_argument("--heads", type=int, nargs="+", choices=HEADS)
    parser.add_argument("--queries", type=int, nargs="+", choices=QUERIES)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write and check."""
    parsed = parse_arguments(arguments)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("benchmarks.mla needs a Hopper GPU (compute capability 9.0)", file=sys.stderr)
        return 2
    heads = tuple(parsed.heads or (QUICK_HEADS if parsed.quick else HEADS))
    queries = tuple(parsed.queries or (QUICK_QUERIES if parsed.quick else QUERIES))
    bench = Bench(parsed.peers, 3 * LONG[-1] * 2 * HEAD_DIMS)
    for name, reason in bench.absent.items():
        print(f"{name} does not run here: {reason}")
    sweeps = {Cell(16, 1, *shape) for shape in SMALL}
    small = [bench.run(cell, cell in sweeps) for cell in cells(heads, queries, SMALL)]
    large = [] if parsed.quick else [bench.run(cell) for cell in cells(heads, queries, LARGE)]
    long = [] if parsed.quick else [bench.run(Cell(16, 1, 1, tokens)) for tokens in LONG]
    print_cells([*small, *large, *long])
    prefills, no_prefills = measure_prefills(heads, others=not parsed.quick)
    print_prefills(prefills)
    folds = [(h, q) for h in heads for q in queries]
    outcomes = [bar.judge() for bar in Claims(small, large, long, prefills, no_prefills).bars(folds)]
    print_outcomes(outcomes)
    figures: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "copy_bytes_per_s": bench.bytes_per_s,
        "cells": [asdict(m) for m in (*small, *large, *long)],
        "prefills": [asdict(m) for m in prefills],
        "absent": {**bench.absent, **({"prefill": no_prefills} if no_prefills else {})},
    }
    write_json(parsed.json, figures, outcomes)
    return exit_code(outcomes, parsed.check)


if __name__ == "__main__":
    sys.exit(main())
