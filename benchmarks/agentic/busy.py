# SPDX-License-Identifier: Apache-2.0
"""What a step costs the host more while requests come and go than in a measurement where the same ones decode on and on.

Read off the steps of points that `engines` played: those between which nobody got a first token, so that no prompt was in them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from benchmarks.agentic.absolute_fit import absolute_fit
from benchmarks.agentic.records import TurnRecord, Window
from benchmarks.agentic.step_time import StepShape, StepTimeModel

StepSeen = tuple[float, int, int]
"""When a step's tokens came, in seconds, how many requests got one, and for how many it was the first."""

_LEAST_STEPS = 20
_DEVICE_RULED = 1.25  # of the device's part: a point whose steps take hardly longer says nothing about the host
_LEAST_SPREAD = (
    1.3  # between the fewest and the most rows: with less, what is fixed cannot be told from what a row costs
)


class SessionsSeen(NamedTuple):
    """What a point showed at which sessions came and went.

    Args:
        budget_tokens: no step held more; 0: a scheduler chose how many it held.
        host_slowness: how many times as long the host took as when the model's tables were measured. Costs are told as of then.
    """

    steps: Sequence[StepSeen]
    records: Sequence[TurnRecord]
    window: Window
    budget_tokens: int = 0
    host_slowness: float = 1.0


class BusyCost(NamedTuple):
    """What a step takes of the host beyond a model's tables while requests come and go; `None` where nothing can be told.

    Args:
        fixed_ms, row_us: in any case, and per row; what the tables say too much is negative.
        mixed_ms: while the step behind holds a prompt and fits a CUDA graph, on top of a step without.
        eager_ms: while it is too large for every graph, on top of `mixed_ms`.
    """

    fixed_ms: float
    row_us: float
    mixed_ms: float | None
    eager_ms: float | None


class _Step(NamedTuple):
    rows: int
    took_ms: float
    device_ms: float
    launched_tokens: float
    """Of the step behind, if it holds prompts; 0: it holds none."""


def busy_cost(points: Sequence[SessionsSeen], times: StepTimeModel) -> BusyCost | None:
    """Return what the steps of these points cost the host; None where too few are ruled by it to tell."""
    seen = [_steps_without_prompts(point, times) for point in points]
    alone = [step for steps in seen for step in _host_ruled([step for step in steps if not step.launched_tokens])]
    extra_ms, extra_row_ms = _alone_cost(alone, times) if len(alone) >= _LEAST_STEPS else (0.0, 0.0)

    def launching_ms(is_large: bool) -> float | None:
        """Each point counts once: a host that is slow for a while is slow for a point."""
        found = []
        for point, steps in zip(points, seen, strict=True):
            if is_large and not point.budget_tokens:
                continue  # prompts may have been spread over steps that all fitted a graph
            launching = [step for step in steps if step.launched_tokens and is_large is _is_large(step, times)]
            extras = [
                step.took_ms - _tables_ms(step, times) - extra_ms - extra_row_ms * step.rows
                for step in _host_ruled(launching)
            ]
            found += [median(extras)] if len(extras) >= _LEAST_STEPS else []
        return max(0.0, fmean(found)) if found else None

    mixed_ms, large_ms = launching_ms(False), launching_ms(True)
    if len(alone) < _LEAST_STEPS and mixed_ms is None and large_ms is None:
        return None
    eager_ms = None if large_ms is None else max(0.0, large_ms - (mixed_ms or 0.0))
    return BusyCost(extra_ms, extra_row_ms * 1e3, mixed_ms, eager_ms)


def _alone_cost(steps: Sequence[_Step], times: StepTimeModel) -> tuple[float, float]:
    """Return milliseconds beyond the model's tables, in any case and per row."""
    rows = np.array([step.rows for step in steps], dtype=float)
    took_ms = np.array([step.took_ms for step in steps])
    tables_ms = np.array([_tables_ms(step, times) for step in steps])
    if np.percentile(rows, 95) <= _LEAST_SPREAD * np.percentile(rows, 5):
        return 0.0, float(np.median((took_ms - tables_ms) / rows))
    columns = np.stack([np.ones(len(rows)), rows], axis=1)
    # A point with few long steps counts as much as one with many short ones.
    found, tables = (
        absolute_fit(columns, took_ms, tables_ms * _crowd(rows)),
        absolute_fit(columns, tables_ms, tables_ms),
    )
    return float(found[0] - tables[0]), float(found[1] - tables[1])


def _tables_ms(step: _Step, times: StepTimeModel) -> float:
    return sum(times.host(StepShape(step.rows, 0, 0, 0)))


def _is_large(step: _Step, times: StepTimeModel) -> bool:
    return 0 < times.data.host_ms.graph_tokens < step.launched_tokens


def _host_ruled(steps: Sequence[_Step]) -> Sequence[_Step]:
    """Return all of them, or none where the device rules."""
    if len(steps) < 2 or median(step.took_ms for step in steps) <= _DEVICE_RULED * median(
        step.device_ms for step in steps
    ):
        return []
    return steps


def _crowd(rows: np.ndarray) -> np.ndarray:
    """Return of each step how many steps had about as many rows."""
    order = np.sort(rows)
    return np.searchsorted(order, 1.1 * rows, "right") - np.searchsorted(order, rows / 1.1, "left")


def _steps_without_prompts(point: SessionsSeen, times: StepTimeModel) -> list[_Step]:
    """Return the point's steps that hold no prompt, nor a part of one."""
    inside = [step for step in point.steps if point.window.begin_s <= step[0] < point.window.end_s]
    contexts = _contexts(point.records, np.array([step[0] for step in inside]))
    prompts = _prompt_tokens(point, inside)
    return [
        _Step(
            step[1],
            (step[0] - before[0]) * 1e3 / point.host_slowness,
            times.device_ms(StepShape(step[1], float(contexts[number]), 0, 0)),
            after[1] - after[2] + prompts[number + 1] if prompts[number + 1] else 0.0,
        )
        for number, (before, step, after) in enumerate(zip(inside, inside[1:], inside[2:], strict=False), 1)
        if step[1] and not prompts[number]
    ]


def _prompt_tokens(point: SessionsSeen, steps: Sequence[StepSeen]) -> list[float]:
    """Return of each step how many tokens of prompts it holds, going by first tokens, and by the budget for prompts that need several."""
    new: dict[float, int] = defaultdict(int)
    for record in point.records:
        new[record.first_s] += max(1, record.prompt_tokens - max(0, record.cached_tokens))
    tokens = [0.0] * len(steps)
    for number, (at_s, rows, num_first) in enumerate(steps):
        left = float(max(num_first, new.get(at_s, 0))) if num_first else 0.0
        room = max(1, point.budget_tokens - rows) if point.budget_tokens else math.inf
        for earlier in range(number, -1, -1):
            if left <= 0:
                break
            tokens[earlier] += min(left, room)
            left -= room
    return tokens


def _contexts(records: Sequence[TurnRecord], at_s: np.ndarray) -> np.ndarray:
    """Return the KV tokens that all who decode read at each of these times, as if tokens came evenly."""
    total = np.zeros(len(at_s))
    for record in records:
        span_s = record.last_s - record.first_s
        if record.output_tokens < 2 or span_s <= 0:
            continue
        live = (record.first_s <= at_s) & (at_s < record.last_s)
        total[live] += record.prompt_tokens + record.output_tokens * (at_s[live] - record.first_s) / span_s
    return total
