# SPDX-License-Identifier: Apache-2.0
"""Bars of a simulation: goodput and time per token against stock's best tuning, or against what perfect knowledge would reach."""

from __future__ import annotations

from typing import NoReturn

from benchmarks.agentic.bound import Bound
from benchmarks.agentic.sweep import Point, PointResult
from benchmarks.report import Bar, MissingFigureError, Outcome

GOODPUT_RATIO = {70.0: 1.3, 100.0: 1.2}
TPOT_RATIO = 0.5
BOUND_SHARE = 0.9
"""What must be reached of the bound where the bound itself lies below a bar."""


def bars(
    results: list[PointResult], chosen: dict[str, PointResult | None], bound: Bound, target: float
) -> list[Outcome]:
    """Return goodput and p99 TPOT, ours against stock's best tuning, each held against its bar.

    Where not even the bound would meet a bar, the bar is BOUND_SHARE of what the bound would reach, and the claim says so.
    """
    claim = f"{target:g} tokens/s per user"
    try:
        ours, stock = (_present(chosen, system, target) for system in ("ours", "stock"))
        goodput = _goodput_limit(stock, bound, target)
        fastest = _fastest(results, ours, goodput[0] * float(stock.figures["goodput_per_gpu"]), target)
        tpot = _tpot_limit(results, fastest, stock)
    except MissingFigureError as missing:
        note = str(missing)

        def fail() -> NoReturn:
            raise MissingFigureError(note)

        ratio = GOODPUT_RATIO.get(target, 1.2)
        return [
            Bar(f"{claim}: goodput, ours / best stock", ">=", ratio, fail).judge(),
            Bar(f"{claim}: p99 TPOT, ours / best stock, same load", "<=", TPOT_RATIO, fail).judge(),
        ]
    goodput_limit, goodput_note = goodput
    tpot_limit, tpot_note, same_load = tpot
    ours_goodput, stock_goodput = (float(r.figures["goodput_per_gpu"]) for r in (ours, stock))
    ours_tpot, stock_tpot = (float(r.figures["tpot_ms_p99"]) for r in (fastest, same_load))
    return [
        Bar(
            f"{claim}: goodput, ours / best stock{goodput_note}",
            ">=",
            goodput_limit,
            lambda: ours_goodput / stock_goodput,
        ).judge(),
        Bar(
            f"{claim}: p99 TPOT, ours / best stock, same load{tpot_note}",
            "<=",
            tpot_limit,
            lambda: ours_tpot / stock_tpot,
        ).judge(),
    ]


def _present(chosen: dict[str, PointResult | None], system: str, target: float) -> PointResult:
    result = chosen[system]
    if result is None:
        raise MissingFigureError(f"no point of {system} keeps {target:g} tokens/s for 95% of turns")
    return result


def _goodput_limit(stock: PointResult, bound: Bound, target: float) -> tuple[float, str]:
    wanted = GOODPUT_RATIO.get(target, 1.2)
    possible = bound.tokens_per_s / float(stock.figures["goodput_per_gpu"])
    if possible >= wanted:
        return wanted, ""
    return BOUND_SHARE * possible, f" (the bound is {possible:.2f}, below {wanted:g}: {BOUND_SHARE:.0%} of it)"


def _fastest(results: list[PointResult], ours: PointResult, goodput: float, target: float) -> PointResult:
    """Return the point of ours with the least p99 among those that keep the target and so much goodput, under the load of `ours`."""
    keeping = [
        r
        for r in results
        if (r.point.tuning.system, r.point.num_sessions) == ("ours", ours.point.num_sessions)
        and r.point.tuning.knows_graphs
        and r.figures["tps_p5"] >= target
        and float(r.figures["goodput_per_gpu"]) >= goodput
    ]
    return min(keeping, key=lambda r: float(r.figures["tpot_ms_p99"]), default=ours)


def _tpot_limit(results: list[PointResult], ours: PointResult, stock: PointResult) -> tuple[float, str, PointResult]:
    """Return the limit, a note, and stock's best tuning under the load where ours is best."""
    same = [r for r in results if r.point == Point(stock.point.tuning, ours.point.num_sessions)]
    if not same:
        raise MissingFigureError("stock was not simulated at the load where ours is best")
    least = float(ours.figures["least_tpot_ms_p99"]) / float(same[0].figures["tpot_ms_p99"])
    if least <= TPOT_RATIO:
        return TPOT_RATIO, "", same[0]
    return least / BOUND_SHARE, f" (the bound is {least:.2f}, above {TPOT_RATIO:g}: {BOUND_SHARE:.0%} of it)", same[0]
