# SPDX-License-Identifier: Apache-2.0
"""New tokens into the latent cache on one GPU: our fused append, and the ways that vLLM has for the same.

``python -m benchmarks.append [--quick] [--check] [--json FILE] [--heads H ...] [--tokens T ...]``. A step norms the latents, turns
keys and queries, and writes the cache. All ways run in one process on the same operands, in turn, each as a CUDA graph of 20
calls, and their results are compared. vLLM's projection of queries lies between its norm and its rotation, so that its compiler
cannot join the two: here, too, they are compiled apart.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.latent.append_ways import OURS, WAYS, AppendOperands, WayUnavailableError
from benchmarks.report import Bar, MissingFigureError, exit_code, print_outcomes, print_table, write_json
from tokenspeed_plugin.kernels.graph_timing import time_us

HEADS, TOKENS = (16, 64, 128), (1, 4, 16, 64, 256, 2048)
QUICK_HEADS, QUICK_TOKENS = (16, 128), (1, 16, 256)
DECODE_TOKENS = 256
CACHES = ("bfloat16", "float8_e4m3fn")


@dataclass
class Measured:
    """Microseconds of one size by way, and the largest difference of a way's results to ours."""

    heads: int
    tokens: int
    cache: str
    times_us: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.heads} heads, {self.cache}"

    @property
    def ratio(self) -> float:
        """Ours over the fastest of the others.

        Raises:
            MissingFigureError: one of them did not run.
        """
        others = [self.times_us[name] for name in self.times_us if name != OURS]
        if OURS not in self.times_us or not others:
            raise MissingFigureError(f"{self}: {'ours' if others else 'nothing of vLLM'} did not run")
        return self.times_us[OURS] / min(others)


def measure(heads: int, tokens: int, cache: str, absent: dict[str, str]) -> Measured:
    """Time every way on one size; ways that this machine lacks are named in `absent`."""
    measured = Measured(heads, tokens, cache)
    results = {}
    for name, make in WAYS.items():
        operands = AppendOperands(heads, tokens, cache)
        try:
            call = make(operands)
            results[name] = operands.results(call)
            measured.times_us[name] = time_us(lambda _, call=call: call())  # type: ignore[misc]
        except WayUnavailableError as error:
            absent[name] = str(error)
    for name, theirs in results.items():
        if name != OURS:
            ours = results[OURS]
            differences = [_difference(left, right) for left, right in zip(theirs, ours, strict=True)]
            measured.differences[name] = max(differences)
    return measured


def _difference(left: torch.Tensor, right: torch.Tensor) -> float:
    scale = right.float().norm().clamp(min=1e-30)
    return float((left.float() - right.float()).norm() / scale)


def worst(rows: list[Measured], cache: str, is_decode: bool) -> float:
    """The largest ratio among batches of decode's size, or among larger ones."""
    chosen = [row for row in rows if row.cache == cache and (row.tokens <= DECODE_TOKENS) == is_decode]
    if not chosen:
        raise MissingFigureError("no such size was run")
    return max(row.ratio for row in chosen)


def largest_difference(rows: list[Measured]) -> float:
    """The largest relative difference between our results and vLLM's."""
    found = [value for row in rows for value in row.differences.values()]
    if not found:
        raise MissingFigureError("nothing of vLLM ran")
    return max(found)


def bars(rows: list[Measured]) -> list[Bar]:
    """What ours has to show before `auto` may choose it."""
    return [
        *(
            Bar(
                f"{cache} cache, {size}: worst time over vLLM's fastest", "<=", 1.0, partial(worst, rows, cache, decode)
            )
            for cache in CACHES
            for size, decode in (("up to 256 tokens", True), ("more tokens", False))
        ),
        Bar("largest relative difference to vLLM's results", "<=", 0.03, partial(largest_difference, rows)),
    ]


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer heads and tokens")
    parser.add_argument("--check", action="store_true", help="exit with 1 and name every bar that is not met")
    parser.add_argument("--json", metavar="FILE", help="write all figures and bars to FILE")
    parser.add_argument("--heads", type=int, nargs="+")
    parser.add_argument("--tokens", type=int, nargs="+")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write and check."""
    parsed = parse_arguments(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.append needs a GPU", file=sys.stderr)
        return 2
    heads = tuple(parsed.heads or (QUICK_HEADS if parsed.quick else HEADS))
    tokens = tuple(parsed.tokens or (QUICK_TOKENS if parsed.quick else TOKENS))
    absent: dict[str, str] = {}
    rows = [measure(h, t, cache, absent) for cache in CACHES for h in heads for t in tokens]
    for name, reason in absent.items():
        print(f"{name} does not run here: {reason}")
    print_rows(rows)
    outcomes = [bar.judge() for bar in bars(rows)]
    print_outcomes(outcomes)
    figures: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "rows": [asdict(row) for row in rows],
        "absent": absent,
    }
    write_json(parsed.json, figures, outcomes)
    return exit_code(outcomes, parsed.check)


def print_rows(rows: list[Measured]) -> None:
    """Print one line per size."""
    lines = []
    for row in rows:
        times = [f"{row.times_us[name]:.2f}" if name in row.times_us else "-" for name in WAYS]
        ratio = f"{row.ratio:.2f}" if len(row.times_us) > 1 and OURS in row.times_us else "-"
        lines.append((str(row), *times, ratio, f"{max(row.differences.values(), default=0.0):.1e}"))
    print_table("Append of new tokens, microseconds", ("size", *WAYS, "ratio", "difference"), lines)


if __name__ == "__main__":
    sys.exit(main())
