# SPDX-License-Identifier: Apache-2.0
"""The bars of `benchmarks.mla`, and how the choice of `auto` is judged: by times that it has not seen."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.latent.cells import LARGE, LONG, SMALL, Cell, geometric_mean
from benchmarks.latent.decode import OURS, STOCK, SWEEP, Measured
from benchmarks.latent.fp8 import fp8_bars
from benchmarks.latent.passes import medians
from benchmarks.latent.prefill import MeasuredPrefill, worst_speedup
from benchmarks.report import Bar, MissingFigureError
from tokenspeed_plugin.kernels.autotune import TuningTable, load_tables
from tokenspeed_plugin.kernels.device import device_key, this_platform
from tokenspeed_plugin.kernels.mla.share import PAGE_TOKENS
from tokenspeed_plugin.kernels.mla.solutions import BENCHMARK_NAMES, BF16, decode_shape
from tokenspeed_plugin.kernels.registry import default_registry
from tokenspeed_plugin.kernels.select import KernelRequest, select_kernel


def shape_of(cell: Cell) -> dict[str, int]:
    """The shape numbers by which selection and tuning know a cell."""
    return decode_shape(cell.heads, cell.query_tokens, PAGE_TOKENS, cell.requests, cell.context_tokens)


def picked_speedup(cell: Cell, times_us: Mapping[str, float], tuning: TuningTable) -> float:
    """The better of stock's over the kernel that selection picks by `tuning`, both of `times_us`.

    Raises:
        MissingFigureError: one of stock's, or the kernel that is picked, did not run.
    """
    if missing := [name for name in STOCK if name not in times_us]:
        raise MissingFigureError(f"{cell}: {', '.join(missing)} did not run")
    picked = select_kernel(KernelRequest("mla", "decode", BF16, shape_of(cell), this_platform()), tuning=tuning)
    for name, solution in BENCHMARK_NAMES.items():
        if solution == picked.spec.solution and name in times_us:
            return min(times_us[stock] for stock in STOCK) / times_us[name]
    raise MissingFigureError(f"{cell}: {picked.spec.solution}, which auto picks, did not run")


def speedup_by_other_passes(measured: Measured) -> float:
    """Median over the passes of what would be picked by a table of all other passes.

    Raises:
        MissingFigureError: there was one pass only, or an implementation did not run.
    """
    found, passes_us = [], [times_us for times_us in measured.passes_us if times_us]
    if len(passes_us) < 2:
        raise MissingFigureError(f"{measured.cell}: {len(passes_us)} pass, at least 2 are needed")
    for index, times_us in enumerate(passes_us):
        others = medians(passes_us[:index] + passes_us[index + 1 :])
        table = TuningTable()
        table.record("mla", "decode", BF16, shape_of(measured.cell), {s: others[n] for n, s in BENCHMARK_NAMES.items()})
        found.append(picked_speedup(measured.cell, medians([times_us]), table))
    return statistics.median(found)


@dataclass
class Claims:
    """The figures that the bars of the project's issue on kernels ask for."""

    decodes: Sequence[Measured]
    prefills: list[MeasuredPrefill] = field(default_factory=list)
    no_prefills: str = ""

    def _of(self, shapes: Sequence[tuple[int, int]], what: str) -> list[Measured]:
        """Those whose batch has one of the shapes, in which our bf16 kernel ran."""
        found = [m for m in self.decodes if (m.cell.requests, m.cell.context_tokens) in shapes and OURS in m.times_us]
        if not found:
            raise MissingFigureError(f"{what} were not run")
        return found

    def speedup(self, heads: int, queries: int) -> float:
        """Geometric mean over the small batches of a fold, all of which must have run."""
        rows = [m for m in self._of(SMALL, "small batches") if (m.cell.heads, m.cell.query_tokens) == (heads, queries)]
        if len(rows) < len(SMALL):
            raise MissingFigureError(f"{len(rows)} of {len(SMALL)} cells were run")
        return geometric_mean([m.speedup for m in rows])

    def against_sweep(self) -> float:
        """Time at H16 q1 B1 L64K over that of reading the same bytes."""
        for m in self.decodes:
            if m.cell == Cell(16, 1, 1, 65536) and {OURS, SWEEP} <= m.times_us.keys():
                return m.times_us[OURS] / m.times_us[SWEEP]
        raise MissingFigureError("H16 q1 B1 L64K was not run")

    def growth(self) -> float:
        """Largest time per KV byte at long contexts over that at 128K."""
        rows = self._of([(1, tokens) for tokens in LONG], "contexts of 128K to 1M")
        if len(rows) < len(LONG):
            raise MissingFigureError(f"{len(rows)} of {len(LONG)} contexts were run")
        per_byte = {m.cell.context_tokens: m.times_us[OURS] / m.cell.kv_bytes for m in rows}
        return max(per_byte.values()) / per_byte[LONG[0]]

    def worst_large(self) -> float:
        """Smallest speed-up of our kernel at large batches."""
        return min(m.speedup for m in self._of(LARGE, "large batches"))

    def worst_auto(self) -> float:
        """Smallest speed-up at large batches of what selection picks by the tables it has: none of this run."""
        tuning = load_tables(device_key(this_platform().name, default_registry()))
        return min(picked_speedup(m.cell, m.times_us, tuning) for m in self._of(LARGE, "large batches"))

    def worst_by_other_passes(self) -> float:
        """The same by a table of this run, each pass judged by a table of the others."""
        return min(speedup_by_other_passes(m) for m in self._of(LARGE, "large batches"))

    def bars(self, folds: Sequence[tuple[int, int]]) -> list[Bar]:
        """All bars, none softened; what was not measured is not met."""
        judged = [m for m in self.decodes if (m.cell.requests, m.cell.context_tokens) in (*SMALL, *LARGE)]
        return [
            *(
                Bar(f"H {h}, q {q}: geometric mean speed-up over small batches", ">=", 1.3, partial(self.speedup, h, q))
                for h, q in folds
            ),
            Bar("large batches: worst speed-up of our kernel", ">=", 0.95, self.worst_large),
            Bar("large batches: worst speed-up of what auto picks", ">=", 0.98, self.worst_auto),
            Bar("H16 q1 B1 L64K: time over a read-only sweep", "<=", 1.3, self.against_sweep),
            Bar("H16 q1 B1: time per KV byte, 128K to 1M", "<=", 1.05, self.growth),
            *fp8_bars(judged),
            Bar(
                "prefill on a cached prefix over stock: worst speed-up",
                ">=",
                1.1,
                partial(worst_speedup, self.prefills, self.no_prefills),
            ),
        ]
