# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/kernels.md from what `benchmarks.mla --json` wrote: ``python -m benchmarks.latent.markdown mla.json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenspeed_plugin.kernels.mla.cached_prefill.solutions import ABSORBED, OURS, UNFOLDED

COLUMNS = ("ours", "FlashMLA", "FlashAttention 3", "Triton (vLLM)")
FP8_COLUMNS = ("ours, FP8", "FlashMLA, FP8", "ours")
STOCK = ("FlashMLA", "FlashAttention 3")


def cell_lines(document: dict[str, Any]) -> Iterator[str]:
    """One row per cell: floor and times in microseconds, and the better of stock's over ours."""
    yield f"| H | q | B | L | floor | {' | '.join(COLUMNS)} | speed-up |"
    yield "|---" * (6 + len(COLUMNS)) + "|"
    for measured in document["cells"]:
        cell, times_us = measured["cell"], measured["times_us"]
        if "ours" not in times_us:
            continue
        shape = [cell["heads"], cell["query_tokens"], cell["requests"], f"{cell['context_tokens'] // 1024}K"]
        times = [f"{times_us[name]:.1f}" if name in times_us else "-" for name in COLUMNS]
        speedup = min(times_us[name] for name in STOCK) / times_us["ours"]
        yield f"| {' | '.join(map(str, shape))} | {measured['floor_us']:.1f} | {' | '.join(times)} | {speedup:.2f} |"


def fp8_lines(document: dict[str, Any]) -> Iterator[str]:
    """One row per cell that was measured with an e4m3 cache, in microseconds."""
    yield "| cache | H | q | B | L | ours | FlashMLA | ours, bf16 | over bf16 | over FlashMLA |"
    yield "|---" * 10 + "|"
    for measured in document["cells"]:
        cell, times_us = measured["cell"], measured["times_us"]
        if FP8_COLUMNS[0] not in times_us:
            continue
        shape = [cell["heads"], cell["query_tokens"], cell["requests"], f"{cell['context_tokens'] // 1024}K"]
        times = [f"{times_us[name]:.1f}" if name in times_us else "-" for name in FP8_COLUMNS]
        ratios = [
            f"{times_us[name] / times_us[FP8_COLUMNS[0]]:.2f}" if name in times_us else "-"
            for name in reversed(FP8_COLUMNS[1:])
        ]
        yield f"| e4m3 | {' | '.join(map(str, (*shape, *times, *ratios)))} |"


def prefill_lines(document: dict[str, Any]) -> Iterator[str]:
    """One row per prefill on a cached prefix, in microseconds, and the better of vLLM's two ways over ours."""
    yield "| H | new | cached | floor | ours | vLLM, absorbed | vLLM, unfolded | speed-up |"
    yield "|---" * 8 + "|"
    for measured in document.get("prefills", []):
        cell, times_us = measured["cell"], measured["times_us"]
        shape = [cell["heads"], cell["query_tokens"], f"{cell['context_tokens'] // 1024}K"]
        times = [f"{times_us[name]:.0f}" if name in times_us else "-" for name in (OURS, ABSORBED, UNFOLDED)]
        speedup = min(times_us[name] for name in (ABSORBED, UNFOLDED) if name in times_us) / times_us[OURS]
        yield f"| {' | '.join(map(str, shape))} | {measured['floor_us']:.0f} | {' | '.join(times)} | {speedup:.2f} |"


def bar_lines(document: dict[str, Any]) -> Iterator[str]:
    """One row per bar."""
    yield "| claim | measured | bar | result |"
    yield "|---|---|---|---|"
    for bar in document["bars"]:
        measured = bar["note"] if bar["measured"] is None else f"{bar['measured']:.3g}"
        result = "met" if bar["met"] else "not met"
        yield f"| {bar['claim']} | {measured} | {bar['relation']} {bar['limit']} | {result} |"


def main(arguments: list[str]) -> int:
    """Print the tables."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    document = json.loads(Path(arguments[0]).read_text())
    tables = (cell_lines, fp8_lines, prefill_lines, bar_lines)
    print("\n\n".join("\n".join(lines(document)) for lines in tables))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
