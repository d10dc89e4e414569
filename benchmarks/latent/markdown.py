# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/kernels.md from what `benchmarks.mla --json` wrote: ``python -m benchmarks.latent.markdown mla.json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COLUMNS = ("ours", "FlashMLA", "FlashAttention 3", "Triton (vLLM)")
STOCK = ("FlashMLA", "FlashAttention 3")


def cell_lines(document: dict[str, Any]) -> Iterator[str]:
    """One row per cell: floor and times in microseconds, and the better of stock's over ours."""
    yield f"| H | q | B | L | floor | {' | '.join(COLUMNS)} | speed-up |"
    yield "|---" * (6 + len(COLUMNS)) + "|"
    for measured in document["cells"]:
        cell, times_us = measured["cell"], measured["times_us"]
        shape = [cell["heads"], cell["query_tokens"], cell["requests"], f"{cell['context_tokens'] // 1024}K"]
        times = [f"{times_us[name]:.1f}" if name in times_us else "-" for name in COLUMNS]
        speedup = min(times_us[name] for name in STOCK) / times_us["ours"]
        yield f"| {' | '.join(map(str, shape))} | {measured['floor_us']:.1f} | {' | '.join(times)} | {speedup:.2f} |"


def bar_lines(document: dict[str, Any]) -> Iterator[str]:
    """One row per bar."""
    yield "| claim | measured | bar | result |"
    yield "|---|---|---|---|"
    for bar in document["bars"]:
        measured = bar["note"] if bar["measured"] is None else f"{bar['measured']:.3g}"
        result = "met" if bar["met"] else "not met"
        yield f"| {bar['claim']} | {measured} | {bar['relation']} {bar['limit']} | {result} |"


def main(arguments: list[str]) -> int:
    """Print both tables."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    document = json.loads(Path(arguments[0]).read_text())
    print("\n".join((*cell_lines(document), "", *bar_lines(document))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
