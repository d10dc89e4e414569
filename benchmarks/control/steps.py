# SPDX-License-Identifier: Apache-2.0
"""What a step of a control plane costs, and the statistics of many steps."""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


def clock_from_environment() -> Callable[[], int]:
    """Return the clock in ns: thread CPU time, which a busy neighbour cannot stretch.

    ``BENCH_CLOCK=wall`` selects wall time. Raises ValueError for any other value.
    """
    name = os.environ.get("BENCH_CLOCK", "thread")
    clocks = {"thread": time.thread_time_ns, "wall": time.perf_counter_ns}
    if name not in clocks:
        raise ValueError(f"BENCH_CLOCK={name!r}: allowed values are {sorted(clocks)}")
    return clocks[name]


class OtherThreadsClock:
    """CPU time that the other threads of the process spend: work moved off the measured thread is not free."""

    def __init__(self) -> None:
        self._start_ns = self._other_ns()

    def elapsed_ns(self) -> int:
        """Return the nanoseconds since construction."""
        return max(0, self._other_ns() - self._start_ns)

    @staticmethod
    def _other_ns() -> int:
        return time.process_time_ns() - time.thread_time_ns()


class StepCost(NamedTuple):
    """One step of a plane: nanoseconds by phase, then what the step scheduled."""

    plan_ns: int
    extract_ns: int
    events_ns: int
    update_ns: int
    num_requests: int
    num_tokens: int
    num_prefill_tokens: int
    num_emitted: int

    @property
    def total_ns(self) -> int:
        """Nanoseconds of all four phases."""
        return self.plan_ns + self.extract_ns + self.events_ns + self.update_ns


@dataclass
class StepLog:
    """Costs of the steps and of the arrivals since the log was made."""

    steps: list[StepCost] = field(default_factory=list)
    adds_ns: list[int] = field(default_factory=list)

    def as_array(self) -> NDArray[np.int64]:
        """Return the steps as an array of shape (steps, fields of StepCost)."""
        return np.array(self.steps, dtype=np.int64).reshape(-1, len(StepCost._fields))


def percentile(values: Sequence[float] | NDArray[Any], q: float) -> float:
    """Return the q-th percentile, NaN for an empty sequence."""
    return float(np.percentile(np.asarray(values), q)) if len(values) else float("nan")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return p50 and p99 of `values`."""
    return {"p50": percentile(values, 50), "p99": percentile(values, 99)}


def summarize(log: StepLog) -> dict[str, float]:
    """Return the statistics of a log: microseconds per step, counts, CPU seconds per 1,000 output tokens.

    A statistic over nothing, such as prefill steps of a steady decode, is left out.
    """
    rows = log.as_array()
    phases_us = rows[:, :4] / 1e3
    step_us = phases_us.sum(axis=1)
    num_prefill = rows[:, StepCost._fields.index("num_prefill_tokens")]
    generated = int(rows[:, StepCost._fields.index("num_emitted")].sum())
    adds_s = sum(log.adds_ns) / 1e9
    control_s = float(step_us.sum()) / 1e6 + adds_s
    statistics = {
        "steps": len(rows),
        "plan_p50_us": percentile(phases_us[:, 0] + phases_us[:, 1], 50),
        "update_p50_us": percentile(phases_us[:, 2] + phases_us[:, 3], 50),
        "step_p50_us": percentile(step_us, 50),
        "step_p99_us": percentile(step_us, 99),
        "step_max_us": float(step_us.max()) if len(rows) else float("nan"),
        "step_mean_us": float(step_us.mean()) if len(rows) else float("nan"),
        "decode_step_p50_us": percentile(step_us[num_prefill == 0], 50),
        "prefill_step_p50_us": percentile(step_us[num_prefill > 0], 50),
        "mean_requests": float(rows[:, 4].mean()) if len(rows) else 0.0,
        "empty_steps": int((rows[:, 4] == 0).sum()),
        "generated_tokens": generated,
        "computed_prefill_tokens": int(num_prefill.sum()),
        "add_p50_us": percentile([ns / 1e3 for ns in log.adds_ns], 50),
        "control_s_per_1k_tokens": control_s / generated * 1000 if generated else float("nan"),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    return {name: value for name, value in statistics.items() if not math.isnan(value)}
