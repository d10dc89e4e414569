# SPDX-License-Identifier: Apache-2.0
"""Bars of points on real engines: goodput and time per token against stock's best measured tuning, target by target, and one session alone."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from benchmarks.agentic.goodput_bars import GOODPUT_RATIO, TPOT_RATIO
from benchmarks.report import Bar, MissingFigureError, Outcome

_RETURN_TTFT_RATIO, _NOT_WORSE = 0.91, 1.0

PointFigures = dict[str, Any]
"""Of a point: those of `records.figures`, `system`, `num_sessions`, and `goodput_at`, the goodput by target."""


def point_bars(points: Collection[PointFigures], target_tps: float) -> list[Outcome]:
    """Judge goodput and p99 TPOT at a target, by the points of each system that keep it for 95% of turns."""
    ratio = GOODPUT_RATIO.get(target_tps, max(GOODPUT_RATIO.values()))

    def goodput(point: PointFigures) -> float:
        if (name := f"{target_tps:g}") not in point["goodput_at"]:
            raise MissingFigureError(f"of a point no turns are kept that say what it gave at {name} tokens/s")
        return float(point["goodput_at"][name])

    def meeting(system: str) -> list[PointFigures]:
        found = [point for point in points if point["system"] == system and point["tps_p5"] >= target_tps]
        if not found:
            raise MissingFigureError(f"{system} keeps {target_tps:g} tokens/s for 95% of turns at no load")
        return found

    def best(system: str) -> PointFigures:
        return max(meeting(system), key=goodput)

    def tpot_ratio() -> float:
        load = best("ours")["num_sessions"]
        same = [point for point in points if (point["system"], point["num_sessions"]) == ("stock", load)]
        if not same:
            raise MissingFigureError("stock was not measured at the load where ours is best")
        stock = max(same, key=lambda point: (point["tps_p5"] >= target_tps, goodput(point)))
        wanted = ratio * goodput(stock)
        ours = [point for point in meeting("ours") if point["num_sessions"] == load and goodput(point) >= wanted]
        fastest = min(ours or [best("ours")], key=lambda point: float(point["tpot_ms_p99"]))
        return float(fastest["tpot_ms_p99"]) / float(stock["tpot_ms_p99"])

    claim = f"{target_tps:g} tokens/s per user"
    return [
        Bar(
            f"{claim}: goodput, ours / stock", ">=", ratio, lambda: goodput(best("ours")) / goodput(best("stock"))
        ).judge(),
        Bar(
            f"{claim}: p99 TPOT, ours / stock, same load, by a rate that keeps the goodput",
            "<=",
            TPOT_RATIO,
            tpot_ratio,
        ).judge(),
    ]


def alone_bars(alone: dict[str, dict[str, Any]]) -> list[Outcome]:
    """Judge one session alone: for each history, and a returning turn's TTFT at the longest by its own bar."""
    missing = [system for system in ("stock", "ours") if not alone.get(system) or "error" in alone[system]]
    lengths = sorted(alone["stock"], key=int) if not missing else ["the long history"]

    def ratio(length: str, name: str) -> float:
        if missing:
            raise MissingFigureError(f"one session alone was not measured with {', '.join(missing)}")
        return float(alone["ours"][length][name]) / float(alone["stock"][length][name])

    claims = {"ttft_ms": "TTFT of a returning turn", "cold_ttft_ms": "TTFT of a new prompt", "tpot_ms": "TPOT"}
    outcomes = []
    for length in lengths:
        for name, claim in claims.items():
            strict = name == "ttft_ms" and length == lengths[-1]
            outcomes.append(
                Bar(
                    f"one session alone, {length} tokens: {claim}, ours / stock",
                    "<=",
                    _RETURN_TTFT_RATIO if strict else _NOT_WORSE,
                    lambda length=length, name=name: ratio(length, name),
                ).judge()
            )
    return outcomes
