# SPDX-License-Identifier: Apache-2.0
"""What a step costs the host more while requests come and go than in a measurement where the same ones decode on and on.

Read off the steps of a point that `engines` played: those between which nobody got a first token, so that no prompt was in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from benchmarks.agentic.records import TurnRecord, Window
from benchmarks.agentic.step_time import StepShape, StepTimeModel

StepSeen = tuple[float, int, int]
"""When a step's tokens came, in seconds, how many requests got one, and for how many it was the first."""

_LEAST_STEPS = 20
_DEVICE_RULED = (
    1.25  # of the host's part: a step in which the device takes longer than that says nothing about the host
)


def busy_row_us(
    steps: Sequence[StepSeen], records: Sequence[TurnRecord], window: Window, times: StepTimeModel
) -> float | None:
    """Return microseconds per row beyond what `times` says of these steps; None where too few are ruled by the host to tell."""
    inside = [step for step in steps if window.begin_s <= step[0] < window.end_s]
    at_s = np.array([step[0] for step in inside])
    contexts = _contexts(records, at_s)
    found = []
    for number, (before, step, after) in enumerate(zip(inside, inside[1:], inside[2:], strict=False), 1):
        # A prompt in the step behind is launched during this one.
        if step[2] or after[2] or not step[1]:
            continue
        took_ms = (step[0] - before[0]) * 1e3
        host_ms = sum(times.host(StepShape(step[1], 0, 0, 0)))
        if times.device_ms(StepShape(step[1], float(contexts[number]), 0, 0)) <= _DEVICE_RULED * host_ms:
            found.append((took_ms - host_ms) * 1e3 / step[1])
    return max(0.0, median(found)) if len(found) >= _LEAST_STEPS else None


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
