# SPDX-License-Identifier: Apache-2.0
"""A plane for the tests: plans every live request, chunk by chunk, and notes what the driver tells it."""

from __future__ import annotations

from benchmarks.control.driver import PlannedStep, Scheduled, UpdateCost


class CountingPlane:
    """First come, first served within a token budget; unlimited memory; no cache."""

    name = "counting"
    num_preemptions = 0

    def __init__(
        self, *, block_tokens: int, num_blocks: int, max_requests: int, budget_tokens: int, depth: int = 1
    ) -> None:
        self.depth = depth
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.prompts: dict[str, list[int]] = {}
        self.delivered: dict[str, list[int]] = {}
        self.finished: list[str] = []
        self._max_requests = max_requests
        self._budget_tokens = budget_tokens
        self._open: dict[str, list[int]] = {}  # request -> [tokens left to compute, tokens it may still plan]

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> int:
        self.prompts[request_id] = prompt
        self.delivered[request_id] = []
        self._open[request_id] = [len(prompt), max_tokens]
        return 1000

    def plan(self) -> PlannedStep:
        scheduled: list[Scheduled] = []
        num_prefill, left = 0, self._budget_tokens
        for request_id, state in list(self._open.items())[: self._max_requests]:
            to_compute, may_plan = state
            num_tokens = min(to_compute, left)
            if not may_plan or not num_tokens:
                continue
            left -= num_tokens
            first = to_compute == len(self.prompts[request_id]) and not self.delivered[request_id]
            emits = num_tokens == to_compute
            num_prefill += num_tokens if to_compute > 1 else 0
            state[0] = 1 if emits else to_compute - num_tokens
            state[1] -= emits
            scheduled.append(Scheduled(request_id, num_tokens, emits, 0 if first else -1))
        return PlannedStep(scheduled, num_prefill, 2000, 0)

    def update(self, emitted: dict[str, int], finished: list[str]) -> UpdateCost:
        for request_id, token in emitted.items():
            self.delivered[request_id].append(token)
        for request_id in finished:
            self.finished.append(request_id)
            del self._open[request_id]
        return UpdateCost(0, 3000)
