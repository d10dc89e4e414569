# SPDX-License-Identifier: Apache-2.0
"""The loop that stands in for engine and model, the same for every plane."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from benchmarks.control.steps import StepCost, StepLog


class Scheduled(NamedTuple):
    """One request of a planned step."""

    request_id: str
    num_tokens: int
    emits: bool
    """The step computes the last known token, so the model samples a new one."""
    cached_tokens: int
    """Prompt tokens found in the cache when the request is planned for the first time, else -1."""


class PlannedStep(NamedTuple):
    """A planned step with the nanoseconds that planning took."""

    scheduled: list[Scheduled]
    num_prefill_tokens: int
    plan_ns: int
    extract_ns: int


class UpdateCost(NamedTuple):
    """Nanoseconds of handing results to a plane."""

    events_ns: int
    update_ns: int


class Plane(Protocol):
    """A control plane under test."""

    name: str
    depth: int
    """Steps planned ahead of the results: 1 is synchronous, 2 is vLLM's async scheduling."""
    num_preemptions: int

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> int:
        """Submit a request that emits exactly `max_tokens` tokens; return the nanoseconds taken."""

    def plan(self) -> PlannedStep:
        """Plan the next step."""

    def update(self, emitted: dict[str, int], finished: list[str]) -> UpdateCost:
        """Hand over the tokens of the oldest planned step; `finished` emitted their last one."""


class PlaneFactory(Protocol):
    """Builds a plane with a pool of `num_blocks` usable blocks."""

    def __call__(self, *, block_tokens: int, num_blocks: int, max_requests: int, budget_tokens: int) -> Plane:
        """Return a plane with an empty pool."""


@dataclass
class _Live:
    """A request in flight: what it still emits."""

    output: list[int]
    max_tokens: int
    num_emitted: int = 0


def settle() -> None:
    """Collect garbage and freeze what is left, as vLLM's EngineCore does at the end of its start."""
    gc.collect()
    gc.freeze()


class Driver:
    """Feeds a plane with requests and with the tokens that their streams prescribe."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.log = StepLog()
        self.on_finish: Callable[[str], None] | None = None
        self.cached_tokens = 0
        self.prompt_tokens = 0
        self.live: dict[str, _Live] = {}
        self._seen: set[str] = set()
        self._in_flight: deque[tuple[dict[str, int], list[str]]] = deque()

    def add(self, request_id: str, prompt: list[int], output: list[int], max_tokens: int) -> None:
        """Submit a request whose model output is `output`, cut at `max_tokens`."""
        self.live[request_id] = _Live(output, max_tokens)
        self.prompt_tokens += len(prompt)
        self.log.adds_ns.append(self.plane.add(request_id, prompt, max_tokens))

    def step(self) -> int:
        """Plan one step and deliver the oldest results due; return the number of planned requests."""
        planned = self.plane.plan()
        self._in_flight.append(self._emit(planned.scheduled))
        if len(self._in_flight) < self.plane.depth and planned.scheduled:
            return len(planned.scheduled)
        emitted, finished = self._in_flight.popleft()
        cost = self.plane.update(emitted, finished)
        self._record(planned, cost, len(emitted))
        self._retire(finished)
        return len(planned.scheduled)

    def num_started(self) -> int:
        """Return how many live requests have emitted a token."""
        return sum(live.num_emitted > 0 for live in self.live.values())

    def _emit(self, scheduled: list[Scheduled]) -> tuple[dict[str, int], list[str]]:
        emitted: dict[str, int] = {}
        finished: list[str] = []
        for request_id, _, emits, cached_tokens in scheduled:
            if cached_tokens >= 0 and request_id not in self._seen:
                self._seen.add(request_id)
                self.cached_tokens += cached_tokens
            if emits:
                live = self.live.get(request_id)
                if live is None or live.num_emitted == live.max_tokens:
                    raise RuntimeError(f"{self.plane.name}: {request_id} planned after its last token")
                emitted[request_id] = live.output[live.num_emitted]
                live.num_emitted += 1
                if live.num_emitted == live.max_tokens:
                    finished.append(request_id)
        return emitted, finished

    def _record(self, planned: PlannedStep, cost: UpdateCost, num_emitted: int) -> None:
        self.log.steps.append(
            StepCost(
                planned.plan_ns,
                planned.extract_ns,
                cost.events_ns,
                cost.update_ns,
                len(planned.scheduled),
                sum(item.num_tokens for item in planned.scheduled),
                planned.num_prefill_tokens,
                num_emitted,
            )
        )

    def _retire(self, finished: list[str]) -> None:
        for request_id in finished:
            del self.live[request_id]
            self._seen.discard(request_id)
        if self.on_finish is not None:
            for request_id in finished:
                self.on_finish(request_id)
