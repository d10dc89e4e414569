# SPDX-License-Identifier: Apache-2.0
"""MLA prefill of new tokens on a cached prefix: both of our ways and of vLLM's, each from latent cache and queries to output.

vLLM's are called through its own metadata builders and layers' implementations, FlashAttention MLA: `absorbed` carries queries
into the latent space and results out of it around `forward_mqa`, `unfolded` is `forward_mha`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from benchmarks.latent.cells import OTHER_PREFILLS, PREFILL_HEADS, PrefillCell, prefill_cells
from benchmarks.latent.passes import in_turn, medians, settled_us
from benchmarks.latent.peers import PeerUnavailableError
from benchmarks.latent.prefill_inputs import PrefillInputs, VllmPrefill
from benchmarks.report import MissingFigureError, print_table
from tokenspeed_plugin.kernels.graph_timing import replay_us
from tokenspeed_plugin.kernels.mla.cached_prefill.solutions import ABSORBED, OURS, OURS_TMA, UNFOLDED

OWN, STOCK = (OURS, OURS_TMA), (ABSORBED, UNFOLDED)
GRAPH_US = 20_000.0
"""Device time of a graph, about: a cell's calls are repeated in it as often as this takes."""
SETTLE_US = 150_000.0
"""Device time for which an implementation's graph runs before it is timed."""


@dataclass
class MeasuredPrefill:
    """Microseconds by implementation, and the largest relative difference of one of ours to one of vLLM's."""

    cell: PrefillCell
    floor_us: float
    times_us: dict[str, float] = field(default_factory=dict)
    """Medians over the passes."""
    passes_us: list[dict[str, float]] = field(default_factory=list)
    """Of each pass."""
    difference: float = 0.0

    def add(self, times_us: dict[str, float], difference: float) -> None:
        """Take in what a pass has timed."""
        self.passes_us.append(times_us)
        self.times_us = medians(self.passes_us)
        self.difference = max(self.difference, difference)

    @property
    def speedup(self) -> float:
        """The better of vLLM's ways over ours, the one that engines take."""
        return min(self.times_us[name] for name in STOCK if name in self.times_us) / self.times_us[OURS]


class PrefillBench:
    """Times cells; where vLLM's ways cannot be had, `absent` says why, and nothing is timed."""

    def __init__(self) -> None:
        self.measured: dict[PrefillCell, MeasuredPrefill] = {}
        self._vllm, self.absent = None, ""
        try:
            self._vllm = VllmPrefill()
        except PeerUnavailableError as error:
            self.absent = str(error)

    def run(self, cell: PrefillCell, number: int) -> None:
        """Time all implementations of a pass on one cell."""
        if self._vllm is not None:
            measured = self.measured.setdefault(cell, MeasuredPrefill(cell, cell.floor_us))
            measured.add(*time_prefill(cell, self._vllm, number))


def time_prefill(cell: PrefillCell, vllm: VllmPrefill, number: int) -> tuple[dict[str, float], float]:
    """Microseconds of a pass, of vLLM's absorbed way the better split setting; and our largest difference."""
    inputs = PrefillInputs(cell, vllm)
    calls = max(1, min(20, round(GRAPH_US / (2 * cell.floor_us))))
    graphs, results = {}, {}
    launches = inputs.launches()  # a graph does not keep what its calls read
    for name, launch in launches.items():
        graphs[name] = _captured(launch, calls)
        results[name] = inputs.output.float()
    times_us: dict[str, float] = {}
    for name in in_turn(list(graphs), number):
        solution = name.partition(" ")[0]
        found = settled_us(functools.partial(replay_us, graphs[name]), SETTLE_US) / calls
        times_us[solution] = min(found, times_us.get(solution, found))
    own = [results.pop(name) for name in OWN if name in results]
    return times_us, max(float((o - theirs).norm() / theirs.norm()) for o in own for theirs in results.values())


def cells_of(heads: tuple[int, ...], others: bool) -> list[PrefillCell]:
    """The cells of the bar with these head counts, and those that only selection reads."""
    more = [cell for cell in OTHER_PREFILLS if others and cell.heads in heads]
    return [*prefill_cells(tuple(h for h in heads if h in PREFILL_HEADS)), *more]


def worst_speedup(measured: list[MeasuredPrefill], absent: str) -> float:
    """Of the cells of the bar, all of which must have run."""
    by_cell = {m.cell: m for m in measured}
    if missing := [cell for cell in prefill_cells() if cell not in by_cell]:
        raise MissingFigureError(absent or f"{', '.join(map(str, missing[:3]))} and others were not run")
    return min(by_cell[cell].speedup for cell in prefill_cells())


def print_prefills(measured: list[MeasuredPrefill]) -> None:
    """Print one line per cell."""
    rows = []
    for m in measured:
        times = [f"{m.times_us[name]:.0f}" if name in m.times_us else "-" for name in (*OWN, *STOCK)]
        rows.append((str(m.cell), f"{m.floor_us:.0f}", *times, f"{m.speedup:.2f}", f"{m.difference:.1e}"))
    names = ("ours", "ours, own unfold", "absorbed (vLLM)", "unfolded (vLLM)")
    columns = ("cell", "floor", *names, "speed-up", "difference")
    print_table("MLA prefill on a cached prefix, bf16, page 64, microseconds", columns, rows)


def _captured(call: Callable[[], None], calls: int) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph
