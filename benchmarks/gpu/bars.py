# SPDX-License-Identifier: Apache-2.0
"""Bars of the GPU benchmark: ours over stock at the engine core, and equal greedy tokens."""

from __future__ import annotations

from typing import Any

from benchmarks.report import Bar, MissingFigureError

SPEEDUP_BARS = {256: 2.0, 64: 1.4, 1: 1.0}
"""Running requests -> least ratio of output tokens/s, ours over stock."""


def throughput_bars(figures: dict[str, Any]) -> list[Bar]:
    """Return the bars of every model and part that the run chose; a part that failed leaves its bars unmet."""
    bars = []
    for model, parts in figures.items():
        if "engine" in parts:
            bars += [_speedup(model, parts["engine"], count, least) for count, least in SPEEDUP_BARS.items()]
        if "tokens" in parts:
            bars.append(_equal_tokens(model, parts["tokens"]))
    return bars


def _speedup(model: str, part: dict[str, Any], count: int, least: float) -> Bar:
    def ratio() -> float:
        if "error" in part:
            raise MissingFigureError(part["error"])
        figures = part["counts"].get(str(count), {})
        if not {"stock", "ours"} <= set(figures):
            raise MissingFigureError(f"N={count} was not run on stock and ours")
        return float(figures["ours"]["tokens_per_s"] / figures["stock"]["tokens_per_s"])

    return Bar(f"{model}, N={count}: output tokens/s, ours over stock", ">=", least, ratio)


def _equal_tokens(model: str, part: dict[str, Any]) -> Bar:
    def num_mismatches() -> float:
        if "error" in part:
            raise MissingFigureError(part["error"])
        if "mismatches" not in part:
            raise MissingFigureError("only one system was run")
        if part["constant_answers"] * 2 > part["requests"]:
            raise MissingFigureError(f"{part['constant_answers']} answers repeat one token: equality proves nothing")
        if not part["batch_invariant"] and part["mismatches"]:
            margins = max(entry.get("margin", float("inf")) for entry in part["mismatches"])
            raise MissingFigureError(
                f"{len(part['mismatches'])} requests differ without batch-invariant kernels, largest margin {margins:.3g}"
            )
        return float(len(part["mismatches"]))

    return Bar(f"{model}: requests whose greedy tokens differ from stock's", "<=", 0.0, num_mismatches)
