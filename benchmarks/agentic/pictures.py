# SPDX-License-Identifier: Apache-2.0
"""Pictures of runs, as PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np

from benchmarks.agentic.records import Recorded

mpl.use("Agg")  # no display

from matplotlib.figure import Figure


def draw_pareto(points: Sequence[tuple[str, Mapping[str, Any]]]) -> bytes:
    """Draw tokens/s per user (that 95% of turns reach) against tokens/s per GPU, a line through each system's loads."""
    figure = Figure(figsize=(9, 5.5))
    axes = figure.add_subplot()
    by_system: dict[str, list[tuple[float, float]]] = {}
    for system, found in points:
        by_system.setdefault(system, []).append((float(found["tps_p5"]), float(found["tokens_per_s_per_gpu"])))
    for system, pairs in by_system.items():
        rates, totals = zip(*sorted(pairs), strict=True)
        axes.plot(rates, totals, marker="o", markersize=4, label=system)
    front = pareto_front([pair for pairs in by_system.values() for pair in pairs])
    if len(front) > 1:
        rates, totals = zip(*front, strict=True)
        axes.step(rates, totals, where="pre", color="black", alpha=0.3, linewidth=3, label="front of all")
    axes.set_xlabel("tokens/s per user that 95% of turns reach")
    axes.set_ylabel("tokens/s per GPU")
    axes.set_title("Throughput against rate per user")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
    return _png(figure)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other one beats in both numbers, by the first number."""
    front: list[tuple[float, float]] = []
    for rate, total in sorted((p for p in points if not np.isnan(p).any()), reverse=True):
        if not front or total > front[-1][1]:
            front.append((rate, total))
    return front[::-1]


def draw_hit_rate(runs: Mapping[str, Recorded]) -> bytes:
    """Draw the share of prompt tokens that came from the cache, in 20 slices of each run's time."""
    figure = Figure(figsize=(9, 4))
    axes = figure.add_subplot()
    for name, recorded in runs.items():
        times, rates = _hits_by_samples(recorded) if len(recorded.samples) > 2 else _hits_by_turns(recorded)
        if times:
            axes.plot(times, rates, label=name)
    axes.set_xlabel("seconds")
    axes.set_ylabel("hit rate")
    axes.set_ylim(0, 1.02)
    axes.set_title("Prefix cache hit rate over time")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
    return _png(figure)


def _hits_by_samples(recorded: Recorded) -> tuple[list[float], list[float]]:
    times, rates = [], []
    for before, after in zip(recorded.samples, recorded.samples[1:], strict=False):
        queried = after.queried_tokens - before.queried_tokens
        if queried > 0:
            times.append(after.at_s)
            rates.append((after.hit_tokens - before.hit_tokens) / queried)
    return times, rates


def _hits_by_turns(recorded: Recorded) -> tuple[list[float], list[float]]:
    known = sorted((r for r in recorded.records if r.cached_tokens >= 0), key=lambda record: record.sent_s)
    times, rates = [], []
    for part in np.array_split(np.arange(len(known)), 20):
        if len(part):
            turns = [known[index] for index in part]
            times.append(turns[-1].sent_s)
            rates.append(sum(t.cached_tokens for t in turns) / sum(t.prompt_tokens for t in turns))
    return times, rates


def draw_latency(runs: Mapping[str, Recorded]) -> bytes:
    """Draw how TTFT, time per output token and the longest gap between tokens are distributed over turns."""
    figure = Figure(figsize=(13, 4.2))
    kinds = (
        ("time to first token, ms", lambda record: record.ttft_s * 1e3),
        ("time per output token, ms", lambda record: 1e3 / record.tps),
        ("longest gap between tokens, ms", lambda record: record.longest_gap_s * 1e3 or float("nan")),
    )
    for column, (label, value) in enumerate(kinds, 1):
        axes = figure.add_subplot(1, 3, column)
        for name, recorded in runs.items():
            values = np.sort([v for v in (value(r) for r in recorded.records if not r.error) if v == v and v > 0])
            if len(values):
                axes.plot(values, np.arange(1, len(values) + 1) / len(values), label=name)
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
        if column == 1:
            axes.set_ylabel("share of turns")
            axes.legend(fontsize="x-small")
    return _png(figure)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    return buffer.getvalue()
