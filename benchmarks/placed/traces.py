# SPDX-License-Identifier: Apache-2.0
"""Traces of single steps: taken inside a worker by PyTorch's profiler, and what they say in figures."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.served.traces import kernel_times

NUM_KERNELS: Final = 25
"""Kernels of a step that are kept, those that take longest; the others are summed up."""
NUM_HOST_OPERATIONS: Final = 15
_COPIES: Final = ("Memcpy", "Memset")
_CUDA_CALL: Final = re.compile(r"cu(da)?[A-Z]")


@dataclass
class StepTrace:
    """Which step of an engine is traced, and the trace of it.

    Attributes:
        num_requests: of the step.
        num_tokens: of all its requests together.
        steps_left: it is so many such steps away; the next one is 1, and 0 means that it has begun.
    """

    num_requests: int
    num_tokens: int
    steps_left: int
    _profiler: Any = None
    _ended: bool = False

    def begin_if_due(self, scheduled: dict[str, int], meet: Callable[[], None]) -> None:
        """Start before a step with so many tokens of each request when it is the one that is asked for.

        All ranks `meet` once their profilers run: one that starts later would keep the others waiting in the first collective.
        """
        if self.steps_left == 0 or (len(scheduled), sum(scheduled.values())) != (self.num_requests, self.num_tokens):
            return
        self.steps_left -= 1
        if self.steps_left == 0:
            _synchronize()
            self._profiler = _profiler()
            self._profiler.start()
            meet()

    def end(self) -> None:
        """Behind the step; nothing happens when it has not begun, or has ended."""
        if self._profiler is not None and not self._ended:
            _synchronize()
            self._profiler.stop()
            self._ended = True

    def figures(self) -> dict[str, Any]:
        """See `step_figures`; empty when no such step came."""
        return {} if self._profiler is None else step_figures(self._profiler.events())


class TracedSteps:
    """Part of a worker extension that traces steps which the engine really runs."""

    def start_tracing(self, num_requests: int, num_tokens: int, at_step: int) -> None:
        """From now on the `at_step`-th step of so many requests and tokens is traced, up to where the next step begins."""
        if not hasattr(self, "step_trace"):
            with _profiler():  # the first one sets up what the GPU's driver needs for it
                _synchronize()
            self.execute_model = self._traced(self.execute_model)
        self.step_trace = StepTrace(num_requests, num_tokens, at_step)

    def _traced(self, original: Callable[..., Any]) -> Callable[..., Any]:
        from vllm.distributed.parallel_state import get_tp_group

        meet = get_tp_group().barrier

        def traced(scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
            self.step_trace.end()
            self.step_trace.begin_if_due(scheduler_output.num_scheduled_tokens, meet)
            return original(scheduler_output, *arguments, **named)

        return traced

    def take_trace(self) -> dict[str, Any]:
        """Figures of the step on the first rank; the others only took part, so that all ranks are slowed down alike."""
        from vllm.distributed.parallel_state import get_tp_group

        self.step_trace.end()
        return self.step_trace.figures() if get_tp_group().rank_in_group == 0 else {}


def step_figures(events: Iterable[Any]) -> dict[str, Any]:
    """What a step did, in microseconds.

    `busy`: in which at least one kernel ran (one that waits for another rank runs, too); `span`: from the first launch to the end of
    the last kernel; `idle`: of that, in which none ran; `launches`: of kernels and graphs, with the host's time in the calls, and
    from the first one's start to the last one's end. `kernels` as in `kernel_times`; `copies` of memory, `calls` of CUDA's
    interfaces and `host` operations (without what they call) by name.
    """
    every = list(events)
    on_gpu = [e for e in every if e.device_type.name == "CUDA" and not getattr(e, "is_user_annotation", False)]
    kernels = [event for event in on_gpu if not event.name.startswith(_COPIES)]
    on_host = [event for event in every if event.device_type.name == "CPU"]
    calls = [event for event in on_host if _CUDA_CALL.match(event.name)]
    launches = [event for event in calls if "Launch" in event.name]
    starts, ends = ([getattr(event.time_range, side) for event in kernels + launches] for side in ("start", "end"))
    span_us = max(ends, default=0.0) - min(starts, default=0.0)
    busy_us = _union_us([(event.time_range.start, event.time_range.end) for event in kernels])
    ranked = kernel_times(kernels, 1) if kernels else []
    return {
        "busy_us": busy_us,
        "span_us": span_us,
        "idle_us": span_us - busy_us,
        "num_kernels": len(kernels),
        "launches": {
            "calls": len(launches),
            "us": sum(_length_us(event) for event in launches),
            "span_us": max((e.time_range.end for e in launches), default=0.0)
            - min((e.time_range.start for e in launches), default=0.0),
        },
        "kernels": ranked[:NUM_KERNELS],
        "other_kernels_us": sum(kernel["us"] for kernel in ranked[NUM_KERNELS:]),
        "copies": _by_name((e.name, _length_us(e)) for e in on_gpu if e.name.startswith(_COPIES)),
        "calls": _by_name((event.name, _length_us(event)) for event in calls),
        "host": _by_name((event.name, event.self_cpu_time_total) for event in on_host)[:NUM_HOST_OPERATIONS],
    }


def _union_us(spans: Sequence[tuple[float, float]]) -> float:
    total, latest = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, latest))
        latest = max(latest, end)
    return total


def _by_name(found: Iterable[tuple[str, float]]) -> list[dict[str, Any]]:
    """Calls and microseconds of each name, the longest first."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for name, us in found:
        times[name].append(us)
    rows = [{"name": name, "calls": len(each), "us": sum(each)} for name, each in times.items()]
    return sorted(rows, key=lambda row: (-row["us"], row["name"]))


def _length_us(event: Any) -> float:
    return float(event.time_range.end - event.time_range.start)


def _profiler() -> Any:
    import torch
    from torch.profiler import ProfilerActivity, profile

    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return profile(activities=[ProfilerActivity.CPU, *gpu])


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
