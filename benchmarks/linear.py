# SPDX-License-Identifier: Apache-2.0
"""Linear layers of few rows on one GPU: our kernel, cuBLAS as vLLM calls it, and reading the weights at the speed of a copy.

``python -m benchmarks.linear [--quick] [--check] [--json FILE] [--rows N ...] [--layers NAME ...]``. Each layer is a CUDA graph
of 20 calls over weights that are rotated over at least four times the L2, each way in turn in several passes. A *chain* is what
a decoder layer does without attention: norm, qkv, output, norm, gate and up, activation, down, by either product; its norms are
our all-reduce's without the exchange.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.latent.passes import in_turn, medians
from benchmarks.latent.timing import L2_MULTIPLE, copy_bytes_per_s
from benchmarks.report import Bar, MissingFigureError, exit_code, print_outcomes, print_table, write_json
from tokenspeed_plugin.kernels.comm import library as comm
from tokenspeed_plugin.kernels.comm.all_reduce_add_norm import AllReduceAddNorm, RowShape
from tokenspeed_plugin.kernels.comm.peer_memory import PeerMemory
from tokenspeed_plugin.kernels.graph_timing import GRAPH_CALLS, time_us
from tokenspeed_plugin.kernels.linear import library
from tokenspeed_plugin.kernels.linear.few_rows import FewRows
from tokenspeed_plugin.kernels.linear.operation import takes_layer
from tokenspeed_plugin.kernels.linear.reference import few_rows_reference

OURS, LATE, CUBLAS, FLOOR = "ours", "ours, no early start", "cuBLAS", "floor"
ROWS, QUICK_ROWS = (1, 2, 4, 8, 16), (1, 16)
LAYERS = {
    "8B of 2 ranks: qkv": (3072, 4096),
    "8B of 2 ranks: output": (4096, 2048),
    "8B of 2 ranks: gate and up": (12288, 4096),
    "8B of 2 ranks: down": (4096, 6144),
    "8B: qkv": (6144, 4096),
    "8B: output": (4096, 4096),
    "8B: gate and up": (24576, 4096),
    "8B: down": (4096, 12288),
    "1B: gate and up": (12288, 2048),
    "1B: down": (2048, 6144),
}
QUICK_LAYERS = tuple(LAYERS)[:4]
CHAIN = tuple(LAYERS)[:4]
PASSES, CHAIN_LAYERS = 3, 4
EPSILON = 1e-6
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Measured:
    """Microseconds of a layer by way, and errors over the largest value of the exact result."""

    layer: str
    rows: int
    floor_us: float
    taken: bool = False
    """Whether an engine takes ours there under `--kernels auto`."""
    times_us: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.layer}, {self.rows} rows"

    @property
    def speedup(self) -> float:
        """Of ours over cuBLAS."""
        return self.times_us[CUBLAS] / self.times_us[OURS]


class Bench:
    """The ways to take a product on this machine's GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        own = library.load()
        self.ours = FewRows(own, self.device)
        self.products: dict[str, Product] = {
            OURS: self.ours,
            LATE: FewRows(own, self.device, dependent_launch=False),
            CUBLAS: torch.nn.functional.linear,
        }
        self.bytes_per_s = copy_bytes_per_s(torch.empty(1 << 29, dtype=torch.bfloat16, device=self.device))

    def measure(self, layer: str, rows: int) -> Measured:
        """Time a layer by every way."""
        out, in_values = LAYERS[layer]
        weight_bytes = 2 * out * in_values
        count = max(2, min(GRAPH_CALLS, math.ceil(L2_MULTIPLE * self.l2_bytes / weight_bytes) + 1))
        weights = [self._draw(out, in_values) for _ in range(count)]
        operand = self._draw(rows, in_values, scale=1.0)
        taken = takes_layer(weights[0]) and self.ours.takes(operand, weights[0], None)
        measured = Measured(layer, rows, weight_bytes / self.bytes_per_s * 1e6, taken)
        exact = few_rows_reference(operand.double(), weights[0].double())
        for name, product in self.products.items():
            measured.errors[name] = float(
                (product(operand, weights[0]).double() - exact).abs().max() / exact.abs().max()
            )
        passes = []
        for number in range(PASSES):
            passes.append({})
            for name in in_turn(list(self.products), number):
                product = self.products[name]
                passes[-1][name] = time_us(lambda call, product=product: product(operand, weights[call % count]), 5)  # type: ignore[misc]
        measured.times_us = medians(passes)
        return measured

    def chain_us(self, rows: int) -> dict[str, float]:
        """Microseconds of a decoder layer without attention, by the product that it takes."""
        layers = [[self._draw(*LAYERS[name]) for name in CHAIN] for _ in range(CHAIN_LAYERS)]
        hidden, attended = LAYERS[CHAIN[0]][1], LAYERS[CHAIN[1]][1]
        stream, heads, factor = (
            self._draw(rows, hidden, scale=1.0),
            self._draw(rows, attended, scale=1.0),
            self._draw(hidden),
        )
        norm = _norm_of(self.device, hidden)

        def layer(product: Product, call: int) -> None:
            qkv, output, gate_up, down = layers[call % CHAIN_LAYERS]
            product(norm.add_norm(stream, stream, factor, EPSILON)[0], qkv)
            normed, _ = norm.add_norm(product(heads, output), stream, factor, EPSILON)
            gate, up = product(normed, gate_up).chunk(2, dim=-1)
            product(torch.nn.functional.silu(gate).mul_(up), down)

        passes = []
        for number in range(PASSES):
            passes.append(
                {name: time_us(partial(layer, self.products[name]), 5) for name in in_turn(list(self.products), number)}
            )
        floor_us = sum(weight.nbytes for weight in layers[0]) / self.bytes_per_s * 1e6
        return medians(passes) | {FLOOR: floor_us}

    def _draw(self, *shape: int, scale: float = 0.03) -> torch.Tensor:
        return (torch.randn(shape, device=self.device) * scale).bfloat16()


def _norm_of(device: torch.device, hidden: int) -> AllReduceAddNorm:
    """The norm alone: no other rank takes part, so no memory is shared."""
    memory = PeerMemory("no peer", (0,), lambda: None)
    return AllReduceAddNorm(comm.load(), memory, 0, device, RowShape(hidden, torch.bfloat16, 1))


def bars(rows: list[Measured], chains: dict[int, dict[str, float]]) -> list[Bar]:
    """What ours has to show where `--kernels auto` takes it."""

    def worst() -> float:
        taken = [row.speedup for row in rows if row.taken]
        if not taken:
            raise MissingFigureError("nothing was run that an engine takes")
        return min(taken)

    def error() -> float:
        return max(row.errors[OURS] / row.errors[CUBLAS] for row in rows)

    def chain(count: int) -> float:
        return chains[count][CUBLAS] / chains[count][OURS]

    return [
        Bar("worst speed-up over cuBLAS where auto takes it", ">=", 1.0, worst),
        Bar("largest error over cuBLAS's", "<=", 1.5, error),
        *(
            Bar(f"a layer without attention, {count} rows: speed-up", ">=", 1.05, partial(chain, count))
            for count in chains
        ),
    ]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer layers and rows")
    parser.add_argument("--check", action="store_true", help="exit with 1 and name every bar that is not met")
    parser.add_argument("--json", metavar="FILE", help="write all figures and bars to FILE")
    parser.add_argument("--rows", type=int, nargs="+", help="1 to 16")
    parser.add_argument("--layers", nargs="+", choices=tuple(LAYERS), metavar="NAME", help=", ".join(LAYERS))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write and check."""
    parsed = parse_arguments(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.linear needs a GPU", file=sys.stderr)
        return 2
    counts = parsed.rows or (QUICK_ROWS if parsed.quick else ROWS)
    layers = parsed.layers or (QUICK_LAYERS if parsed.quick else tuple(LAYERS))
    with torch.inference_mode():
        bench = Bench()
        rows = [bench.measure(layer, count) for layer in layers for count in counts]
        chains = {count: bench.chain_us(count) for count in counts}
    print_rows(rows, chains)
    outcomes = [bar.judge() for bar in bars(rows, chains)]
    print_outcomes(outcomes)
    figures: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "copy_bytes_per_s": bench.bytes_per_s,
        "rows": [asdict(row) for row in rows],
        "chains_us": chains,
    }
    write_json(parsed.json, figures, outcomes)
    return exit_code(outcomes, parsed.check)


def print_rows(rows: list[Measured], chains: dict[int, dict[str, float]]) -> None:
    """Print one line per layer and number of rows, and one per chain."""
    names = (FLOOR, OURS, LATE, CUBLAS)
    lines = []
    for row in rows:
        times = {FLOOR: row.floor_us, **row.times_us}
        lines.append(
            (str(row), *(f"{times[name]:.2f}" for name in names), f"{row.speedup:.2f}", "yes" if row.taken else "-")
        )
    print_table("Linear layers, microseconds", ("layer", *names, "speed-up", "taken"), lines)
    if rows:
        mean = statistics.geometric_mean(row.speedup for row in rows)
        print(f"geometric mean of the speed-up: {mean:.2f}")
    chained = [
        (f"{count} rows", *(f"{times[name]:.1f}" for name in names), f"{times[CUBLAS] / times[OURS]:.2f}")
        for count, times in chains.items()
    ]
    print_table("A layer of 8B on one of 2 ranks, without attention, microseconds", ("", *names, "speed-up"), chained)


if __name__ == "__main__":
    sys.exit(main())
