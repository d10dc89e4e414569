# SPDX-License-Identifier: Apache-2.0
"""Bars of attention kernels in whole engines: time of a decode step, what the kernels promise, and the same tokens."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from benchmarks.report import Bar, MissingFigureError

CONTROL = "stock-flashmla"
"""Stock with another of vLLM's own kernels: how far its answers lie from stock's is what rounding does to this model."""
LARGEST_RATIO = 1.01
LARGEST_RATIO_ALONE = 0.92
LEAST_SHARE_OF_PREDICTION = 0.8
SMALLEST_PREDICTION = 0.01
"""Of stock's step: a smaller saving cannot be told from noise, and is left to the bar that no step gets slower."""
NOISE_LOGPROB = 0.125
"""Two logits between 8 and 16, each off by one step of bfloat16 (1/16): sums in another order may move them so far."""
LARGEST_ERROR_RATIO = 1.5


def engine_bars(figures: dict[str, Any]) -> list[Bar]:
    """Return the bars; what failed or was left out leaves its bars unmet."""
    counts = figures["sessions"]
    bars = [
        Bar(f"{_of(n)}: time of the decode graph, ours over stock", "<=", LARGEST_RATIO, partial(_ratio, figures, n))
        for n in counts
    ]
    bars.append(
        Bar(
            "1 session: time of the decode graph, ours over stock",
            "<=",
            LARGEST_RATIO_ALONE,
            partial(_ratio, figures, 1),
        )
    )
    bars += [
        Bar(
            f"{_of(n)}: saving of a step over what the kernels promise",
            ">=",
            LEAST_SHARE_OF_PREDICTION,
            partial(_share, figures, n),
        )
        for n in counts
        if _is_judged(figures, n)
    ]
    return bars + [bar for kind in ("tokens", "long_tokens") for bar in _token_bars(figures, kind)]


def _token_bars(figures: dict[str, Any], kind: str) -> list[Bar]:
    """Where answers part, and how far apart they were before; another kernel of vLLM's own is the measure where it ran."""
    control = figures.get(kind, {}).get(CONTROL)
    words = kind.replace("_", " ")
    parted = map(_margin, control["mismatches"]) if control else ()
    noise = max([NOISE_LOGPROB, *(margin for margin in parted if math.isfinite(margin))])
    bars = [
        Bar(
            f"{words}: log-probability between stock's and ours where answers part",
            "<=",
            noise,
            lambda: max(map(_margin, _compared(figures, kind)["mismatches"]), default=0.0),
        )
    ]
    if control:
        claim = f"{words}: mean error of log-probabilities against stock, ours over FlashMLA's"
        bars.append(Bar(claim, "<=", LARGEST_ERROR_RATIO, partial(_error_ratio, figures, kind)))
    return bars


def _error_ratio(figures: dict[str, Any], kind: str) -> float:
    ours, control = _compared(figures, kind)["error"]["mean"], figures[kind][CONTROL]["error"]["mean"]
    return float(ours / control) if control > 0 else (0.0 if ours == 0 else math.inf)


def _compared(figures: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] | None = figures.get(kind, {}).get("ours")
    if found is None:
        reasons = [why for system in ("stock", "ours") if (why := _engine(figures, system).get(f"{kind}_error"))]
        raise MissingFigureError("; ".join(reasons) or "the answers were not compared")
    if found["constant_answers"] * 2 > found["requests"]:
        raise MissingFigureError("most answers repeat one token: equality proves nothing")
    return found


def predicted_ms(figures: dict[str, Any], count: int) -> float:
    """What the kernel benchmark says that a step of `count` sessions saves; nothing where the batch stays with vLLM."""
    choice = _engine(figures, "ours")["who"]["choices"].get(str(count))
    if choice is None or not choice["taken"]:
        return 0.0
    kernels = figures.get("kernels_us", {}).get(str(count))
    if kernels is None:
        raise MissingFigureError(f"the kernels were not timed: {figures.get('kernels_error', 'left out')}")
    return float(figures["layers"] * (kernels["flashattn3"] - kernels["ours"]) * 1e-3)


def _of(count: int) -> str:
    return f"{count} session{'s' if count > 1 else ''}"


def _engine(figures: dict[str, Any], system: str) -> dict[str, Any]:
    found: dict[str, Any] = figures["engines"].get(system, {})
    if "error" in found:
        raise MissingFigureError(f"{system}: {found['error']}")
    return found


def _graph_ms(figures: dict[str, Any], system: str, count: int) -> float:
    found = _engine(figures, system).get("decode", {}).get(str(count), {})
    if "graph_ms" not in found:
        raise MissingFigureError(f"{system} replayed no decode graph of {count} requests")
    return float(found["graph_ms"])


def _ratio(figures: dict[str, Any], count: int) -> float:
    return _graph_ms(figures, "ours", count) / _graph_ms(figures, "stock", count)


def _is_judged(figures: dict[str, Any], count: int) -> bool:
    try:
        return predicted_ms(figures, count) >= SMALLEST_PREDICTION * _graph_ms(figures, "stock", count)
    except (MissingFigureError, KeyError):
        return True  # and the bar says what is missing


def _share(figures: dict[str, Any], count: int) -> float:
    saved = _graph_ms(figures, "stock", count) - _graph_ms(figures, "ours", count)
    return saved / predicted_ms(figures, count)


def _margin(mismatch: dict[str, Any]) -> float:
    """A token that is not among the best is no matter of rounding."""
    return math.inf if mismatch.get("margin_is_lower_bound") else float(mismatch.get("margin", math.inf))
