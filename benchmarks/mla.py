# SPDX-License-Identifier: Apache-2.0
"""MLA on one Hopper GPU: ours, FlashMLA, FlashAttention 3 and Triton as vLLM has them, FP8 and the physical floor.

``python -m benchmarks.mla [--passes N] [--parts small large long fp8 prefill] [--check] [--json FILE]``. All run in one process
on the same inputs, each as a CUDA graph of 20 calls; the KV cache rotates over at least four times the L2 cache. Every pass
times all cells of all parts once, the implementations of a cell one behind the other, in the other direction in every second
pass, each after it has run alone for a while; figures are medians over passes. Planning kernels are left out for all; ours is reported by itself.

``--total-seconds`` begins no pass that would end later, and the file of ``--json`` is written after each pass. ``--peers DIR``
names a folder with vLLM's shared objects (`_flashmla_C`, `_flashmla_extension_C`, `_vllm_fa3_C`) for a machine on which vLLM
itself cannot be imported.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.latent.cells import LARGE, LONG, SMALL, Cell, cells
from benchmarks.latent.claims import Claims
from benchmarks.latent.decode import OURS, STOCK, SWEEP, DecodeBench, Measured
from benchmarks.latent.fp8 import is_measured, table_rows
from benchmarks.latent.passes import Part, run_passes
from benchmarks.latent.prefill import PrefillBench, cells_of, print_prefills
from benchmarks.report import MissingFigureError, Outcome, exit_code, print_outcomes, print_table, write_json
from tokenspeed_plugin.kernels.mla.sm90.library import FP8_SOURCES, SOURCES

HEADS, QUERIES = (16, 32, 64, 128), (1, 2, 4)
QUICK_HEADS, QUICK_QUERIES = (16, 64, 128), (1,)
PARTS, QUICK_PARTS = ("small", "large", "long", "fp8", "prefill"), ("small", "fp8", "prefill")
LONG_CELLS = [Cell(16, 1, 1, tokens) for tokens in LONG]


def print_cells(measured: Sequence[Measured]) -> None:
    """Print one line per cell."""
    names = (OURS, *STOCK, "Triton (vLLM)", SWEEP)
    rows = []
    for m in measured:
        if OURS not in m.times_us:
            continue
        ratio = f"{m.speedup:.2f}" if all(n in m.times_us for n in STOCK) else "-"
        times = [f"{m.times_us[n]:.1f}" if n in m.times_us else "-" for n in names]
        own = [times_us[OURS] for times_us in m.passes_us if OURS in times_us]
        spread = f"{max(own) / min(own) - 1:.1%}"
        rows.append(
            (str(m.cell), f"{m.floor_us:.1f}", *times, ratio, spread, f"{m.plan_us:.1f}", f"{m.difference:.1e}")
        )
    columns = ("cell", "floor", *names, "speed-up", "ours, between passes", "our plan", "difference")
    print_table("MLA decode, bf16, page 64, microseconds", columns, rows)
    columns = ("cell", "ours, FP8", "FlashMLA, FP8", "ours, bf16", "over bf16", "over FlashMLA")
    print_table("MLA decode, e4m3, page 64, microseconds", columns, table_rows(measured))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer heads, query counts and parts")
    parser.add_argument("--check", action="store_true", help="exit with 1 and name every bar that is not met")
    parser.add_argument("--json", metavar="FILE", help="write all figures and bars to FILE, anew after each pass")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="folder with vLLM's shared objects")
    parser.add_argument("--passes", type=int, default=3, help="how often every cell is timed (3)")
    parser.add_argument("--total-seconds", type=float, default=math.inf, help="begin no pass that would end later")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="in this order; all of them unless given")
    parser.add_argument("--heads", type=int, nargs="+", choices=HEADS)
    parser.add_argument("--queries", type=int, nargs="+", choices=QUERIES)
    parser.add_argument("--cells", type=Cell.parse, nargs="+", metavar="HxQxBxL", help="only these: 128x1x16x64K, say")
    parser.add_argument("--no-triton", action="store_true", help="without vLLM's Triton kernel, which is far behind")
    return parser.parse_args(arguments)


def parts_of(options: argparse.Namespace, decode: DecodeBench, prefill: PrefillBench) -> list[Part]:
    """The parts that the command line asks for."""
    heads = tuple(options.heads or (QUICK_HEADS if options.quick else HEADS))
    queries = tuple(options.queries or (QUICK_QUERIES if options.quick else QUERIES))
    names = options.parts or (QUICK_PARTS if options.quick else PARTS)
    chosen = {"small": cells(heads, queries, SMALL), "large": cells(heads, queries, LARGE), "long": LONG_CELLS}
    every = [cell for name in ("small", "large", *(() if options.quick else ("long",))) for cell in chosen[name]]
    chosen["fp8"] = [cell for cell in every if is_measured(cell)]
    if options.cells:
        chosen = {name: [cell for cell in found if cell in options.cells] for name, found in chosen.items()}
    found = []
    for name in names:
        if name == "prefill":
            found.append(Part(name, cells_of(heads, others=not options.quick), prefill.run))
        else:
            found.append(Part(name, chosen[name], decode.run_fp8 if name == "fp8" else decode.run))
    return found


class Results:
    """What was measured, printed and written."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        sweeps = frozenset(Cell(16, 1, *shape) for shape in SMALL)
        self.decode = DecodeBench(options.peers, 3 * LONG[-1], sweeps, triton=not options.no_triton)
        self.prefill = PrefillBench()
        self.parts = parts_of(options, self.decode, self.prefill)

    def outcomes(self) -> list[Outcome]:
        """All bars."""
        heads, queries = self._options.heads or HEADS, self._options.queries or QUERIES
        if self._options.quick:
            heads, queries = self._options.heads or QUICK_HEADS, self._options.queries or QUICK_QUERIES
        return [bar.judge() for bar in self._claims().bars([(h, q) for h in heads for q in queries])]

    def write(self) -> None:
        """Write what there is so far."""
        figures: dict[str, Any] = {
            "gpu": torch.cuda.get_device_name(),
            "kernel_sources": {"cuda_sm90": SOURCES.source_hash(), "cuda_sm90_fp8": FP8_SOURCES.source_hash()},
            "copy_bytes_per_s": self.decode.bytes_per_s,
            "parts": {part.name: part.report() for part in self.parts},
            "worst_auto_by_other_passes": self._by_other_passes()[0],
            "cells": [asdict(m) for m in self.decode.measured.values()],
            "prefills": [asdict(m) for m in self.prefill.measured.values()],
            "absent": {**self.decode.absent, **({"prefill": self.prefill.absent} if self.prefill.absent else {})},
        }
        write_json(self._options.json, figures, self.outcomes())

    def print(self) -> list[Outcome]:
        """Print everything and return the bars."""
        print_cells(list(self.decode.measured.values()))
        print_prefills(list(self.prefill.measured.values()))
        for part in self.parts:
            seconds = ", ".join(f"{s:.1f}" for s in part.seconds)
            print(
                f"{part.name}: {len(part.cells)} cells, passes of {seconds or 'none'} s{part.note and '; ' + part.note}"
            )
        print(f"large batches, auto by a table of the other passes, worst speed-up: {self._by_other_passes()[1]}")
        outcomes = self.outcomes()
        print_outcomes(outcomes)
        return outcomes

    def _claims(self) -> Claims:
        prefills = list(self.prefill.measured.values())
        return Claims(list(self.decode.measured.values()), prefills, self.prefill.absent)

    def _by_other_passes(self) -> tuple[float | None, str]:
        try:
            figure = self._claims().worst_by_other_passes()
        except MissingFigureError as missing:
            return None, str(missing)
        return figure, f"{figure:.3f}"


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write and check."""
    options = parse_arguments(arguments)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("benchmarks.mla needs a Hopper GPU (compute capability 9.0)", file=sys.stderr)
        return 2
    results = Results(options)
    for name, reason in results.decode.absent.items():
        print(f"{name} does not run here: {reason}")
    run_passes(results.parts, options.passes, options.total_seconds, results.write)
    return exit_code(results.print(), options.check)


if __name__ == "__main__":
    sys.exit(main())
