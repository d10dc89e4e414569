# SPDX-License-Identifier: Apache-2.0
"""The least p99 of the time per token that any schedule of a run's work could have.

A step takes at least ``fixed + sum of cost_i`` over the users i who get a token in it, whatever else it holds. The largest of some times
per token is at least their weighted mean, and a user waits for every step between the first token and the last. With weights
``cost_i * gaps_i`` that mean is at least ``sum over steps of length * b_s / B``, where b_s is what the judged users cost in step s and B
the sum of that. A step is at least ``fixed + b_s`` long, and by Cauchy and Schwarz the mean is at least ``fixed + B / steps``. All work
takes its time beside what is fixed, so there are at most ``(time - work) / fixed`` steps. Nothing is assumed about the order, about
what shares a step, or about when prompts run.

The p99 lets some turns be slower: those that cost most are left out of B, and their work still has to be done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.agentic.step_time import StepShape, StepTimeModel

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_NUM_SLOPES = 24


class JudgedTurn(NamedTuple):
    """A turn that the p99 counts."""

    prompt_tokens: int
    num_gaps: int
    """Times between two of its tokens."""


class RunWork(NamedTuple):
    """What a run did in its window.

    Args:
        turns: those that the p99 counts.
        available_ms: the window, from the begin of the first step to the end of the last.
        device_work_ms: what prompts, rows and their contexts took of the device, fixed costs of steps apart.
        most_rows: users that a step may have.
        late_ms: the longest time from the end of a step on the device to the moment that its tokens are handed out.
    """

    turns: Sequence[JudgedTurn]
    available_ms: float
    device_work_ms: float
    most_rows: int
    late_ms: float


class _Line(NamedTuple):
    """A step takes at least ``fixed + rows * row + contexts * context``; all in milliseconds."""

    fixed_ms: float
    row_ms: float
    context_ms: float
    work_ms: float
    """What the run's work adds to all steps together."""


def least_p99_tpot_ms(work: RunWork, times: StepTimeModel) -> float:
    """Return the bound; 0 where there are no turns to judge, infinite when the work does not fit into the time.

    Device and host are both in every step, so each of them, and each mean of the two, gives a bound: the largest one counts.
    """
    turns = [turn for turn in work.turns if turn.num_gaps > 0]
    if not turns:
        return 0.0
    gaps = np.array([turn.num_gaps for turn in turns], dtype=float)
    contexts = np.array([turn.prompt_tokens + 1 for turn in turns], dtype=float)
    bounds = [_bound(line, gaps, contexts, work) for line in _lines(work, times, float(gaps.sum()))]
    return max(bounds, default=0.0)


def _bound(line: _Line, gaps: np.ndarray, contexts: np.ndarray, work: RunWork) -> float:
    left_ms = work.available_ms - line.work_ms
    if left_ms <= 0:
        return float("inf")
    num_steps = left_ms / line.fixed_ms
    costs = line.row_ms + line.context_ms * contexts
    # A p99 of n values lies between two of them: as many as this may be above it.
    num_slower = int(0.01 * (len(gaps) - 1)) + 1
    kept = np.argsort(costs * gaps)[: len(gaps) - num_slower]
    total = float((costs * gaps)[kept].sum())
    if total <= 0:
        return 0.0
    # A first token that is handed out late makes what is left of its turn look shorter.
    late_ms = work.late_ms * float(costs[kept].sum()) / total
    return line.fixed_ms + total / num_steps - late_ms


def _lines(work: RunWork, times: StepTimeModel, num_gaps: float) -> Iterator[_Line]:
    device, factor = times.data.device, times.device_factor
    fixed_ms, row_ms, context_ms = (
        factor * value for value in (device.fixed_ms, device.row_us / 1e3, device.context_us / 1e3)
    )
    for slope_ms, least_ms in _below_host(work.most_rows, times):
        for share in _SHARES:
            rest = 1.0 - share
            line = _Line(
                share * fixed_ms + rest * least_ms,
                share * row_ms + rest * slope_ms,
                share * context_ms,
                share * work.device_work_ms + rest * slope_ms * num_gaps,
            )
            if line.fixed_ms > 0:
                yield line


def _below_host(most_rows: int, times: StepTimeModel) -> Iterator[tuple[float, float]]:
    """Return straight lines that no step's CPU time lies below: slope per row, and value without rows."""
    scheduler, host = times.data.scheduler_ms[times.system], times.data.host_ms
    knots = sorted({0.0, float(most_rows), *(row for row in (*scheduler.rows, *host.rows) if row <= most_rows)})
    values = []
    for rows in knots:
        costs = times.host(StepShape(rows, 0, 0, 0))
        values.append(costs.schedule_ms + costs.runner_ms + costs.update_ms)
    steepest = max(0.0, (values[-1] - min(values)) / max(1.0, knots[-1]))
    for slope in np.linspace(0.0, 2 * steepest, _NUM_SLOPES).tolist():
        yield slope, min(value - slope * rows for rows, value in zip(knots, values, strict=True))
