# SPDX-License-Identifier: Apache-2.0
"""How long a step takes on a GPU machine: a model that stands in for the GPU, from a data file of measurements.

A step costs CPU time of the engine's one thread (scheduling, launching, taking results in) and time of the device. They
overlap with asynchronous scheduling; `SimulatedEngine` plays the order in which they follow each other.

``device = fixed + rows * row + context of decodes * context + prefill tokens * prefill + pairs * pair``, where pairs
counts (token, token it attends to) of the prompts in the step, and ``mixed`` more where there are any.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

H200_DENSE_1B = Path(__file__).with_name("h200_dense_1b.json")


class StepModelError(ValueError):
    """A data file that does not describe a step model; names file, place and what is needed."""


class StepShape(NamedTuple):
    """What a step computes, as far as its time depends on it."""

    num_decodes: float
    context_tokens: float
    """KV tokens that the decodes read."""
    prefill_tokens: float
    prefill_pairs: float


class _SchedulerCost(msgspec.Struct, forbid_unknown_fields=True):
    rows: list[float]
    schedule: list[float]
    update: list[float]
    mixed: float = 0.0
    """Added to what `host_ms` says of a step that holds prompts, and `eager` likewise; both also per request that decodes."""
    eager: float = 0.0
    mixed_row_us: float = 0.0
    eager_row_us: float = 0.0
    busy_ms: float = 0.0
    """What a step takes longer while requests come and go than while the same ones decode on and on, and `busy_row_us` per row."""
    busy_row_us: float = 0.0


class _HostCost(msgspec.Struct, forbid_unknown_fields=True):
    rows: list[float]
    runner: list[float]
    other: list[float]
    mixed: float = 0.0
    """Added to a step that holds prompts: it runs without full CUDA graphs."""
    eager: float = 0.0
    """Added to a step of more than `graph_tokens`: it runs without any."""
    graph_tokens: int = 0
    """Most tokens of a captured step; 0: there is no such limit."""


class _DeviceCost(msgspec.Struct, forbid_unknown_fields=True):
    fixed_ms: float
    row_us: float
    context_us: float
    prefill_us: float
    pair_us: float
    mixed_ms: float = 0.0
    """Added to a captured step that holds prompts: decodes beside prompts run less well than alone."""
    eager_ms: float = 0.0
    """Added instead to a step of more than `graph_tokens` that holds prompts."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    scheduler_ms: dict[str, _SchedulerCost]
    host_ms: _HostCost
    device: _DeviceCost
    sources: dict[str, str]
    reference_ms: dict[str, float] = {}
    """By system, what reference steps took in the run that the model was fitted to: by these another run's host is compared."""


class HostTimes(NamedTuple):
    """CPU milliseconds of the engine's thread for one step."""

    schedule_ms: float
    runner_ms: float
    update_ms: float


@dataclass(frozen=True)
class StepTimeModel:
    """Times of one system's steps.

    Args:
        system: ``stock`` or ``ours``, whose scheduler's CPU time counts.
        device_factor: multiplies the device's time, to see what a wrong model or another GPU does.
        host_factor: multiplies the CPU time of the engine's thread: a host of another day.
    """

    data: _File
    system: str
    device_factor: float = 1.0
    host_factor: float = 1.0

    @classmethod
    def load(cls, path: Path, system: str) -> StepTimeModel:
        """Read a data file. Raises StepModelError for one that is malformed or does not know `system`."""
        try:
            data = msgspec.json.decode(path.read_bytes(), type=_File)
        except (OSError, msgspec.DecodeError) as error:
            raise StepModelError(f"{path}: {error}; needed: a step model as in {H200_DENSE_1B.name}") from error
        if system not in data.scheduler_ms:
            raise StepModelError(f"{path}: no scheduler_ms for {system!r}; allowed: {sorted(data.scheduler_ms)}")
        return cls(data, system)

    @classmethod
    def of(cls, document: dict[str, Any], system: str) -> StepTimeModel:
        """Take a data file's content as it is."""
        return cls(msgspec.convert(document, _File), system)

    def scaled(self, factor: float) -> StepTimeModel:
        """Return the model of a device that takes `factor` times as long."""
        return replace(self, device_factor=factor)

    def on_host(self, factor: float) -> StepTimeModel:
        """Return the model on a host that takes `factor` times as long."""
        return replace(self, host_factor=factor)

    def graph_sizes(self) -> list[int]:
        """Return the numbers of tokens that vLLM would capture CUDA graphs for."""
        most = self.data.host_ms.graph_tokens
        return [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)) if size <= most]

    def host(self, step: StepShape) -> HostTimes:
        """Return the CPU times of a step."""
        rows = step.num_decodes + (1 if step.prefill_tokens else 0)
        scheduler, host = self.data.scheduler_ms[self.system], self.data.host_ms
        launch_ms = 0.0
        if step.prefill_tokens:
            launch_ms += host.mixed + scheduler.mixed + step.num_decodes * scheduler.mixed_row_us / 1e3
        if self._is_eager(step):
            launch_ms += host.eager + scheduler.eager + step.num_decodes * scheduler.eager_row_us / 1e3
        busy_ms = scheduler.busy_ms + rows * scheduler.busy_row_us / 1e3
        times_ms = (
            _interpolated(rows, scheduler.rows, scheduler.schedule),
            _interpolated(rows, host.rows, host.runner) + launch_ms,
            _interpolated(rows, scheduler.rows, scheduler.update)
            + _interpolated(rows, host.rows, host.other)
            + busy_ms,
        )
        return HostTimes(*(max(0.0, ms) * self.host_factor for ms in times_ms))

    def device_ms(self, step: StepShape) -> float:
        """Return the device's time of a step."""
        device = self.data.device
        work_us = (
            step.num_decodes * device.row_us
            + step.context_tokens * device.context_us
            + step.prefill_tokens * device.prefill_us
            + step.prefill_pairs * device.pair_us
        )
        return (device.fixed_ms + self.mixed_ms(step) + work_us / 1e3) * self.device_factor

    def mixed_ms(self, step: StepShape) -> float:
        """Return what a step takes longer on the device because it holds prompts, however many tokens they have."""
        if not step.prefill_tokens:
            return 0.0
        return self.data.device.eager_ms if self._is_eager(step) else self.data.device.mixed_ms

    def _is_eager(self, step: StepShape) -> bool:
        return 0 < self.data.host_ms.graph_tokens < step.num_decodes + step.prefill_tokens

    def steady_ms(self, step: StepShape) -> float:
        """Return the time from step to step when steps like this follow each other, host and device overlapping."""
        host = self.host(step)
        return max(self.device_ms(step), host.schedule_ms + host.runner_ms + host.update_ms)


def _interpolated(rows: float, known_rows: list[float], values: list[float]) -> float:
    """Return the value at `rows`: linear between known points and on beyond the last, constant before the first."""
    if len(known_rows) > 1 and rows > known_rows[-1]:
        slope = (values[-1] - values[-2]) / (known_rows[-1] - known_rows[-2])
        return values[-1] + slope * (rows - known_rows[-1])
    return float(np.interp(rows, known_rows, values))
