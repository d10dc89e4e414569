# SPDX-License-Identifier: Apache-2.0
"""A run driven tick by tick, with a record of who was scheduled and who got a token when."""

from __future__ import annotations

from typing import Any

from scheduler_harness import class_of, make_harness
from scheduler_knobs import Knobs

from exact.driver import Driver
from exact.reference import DEFAULT_VOCAB
from exact.workload import Arrival, Workload, words


class Timeline(Driver):
    """Adds requests by hand and remembers what happened.

    Attributes:
        plans: every SchedulerOutput, by tick.
        first_token: tick in which the first token of a request was delivered.
        end: tick in which a request ended.
        computed: tokens computed per request, recomputation included.
        preempted: preemptions per request.
    """

    def __init__(self, scheduler: str, knobs: Knobs, vocab: int = DEFAULT_VOCAB, **overrides: Any) -> None:
        harness = make_harness(class_of(scheduler, knobs), knobs, **overrides)
        super().__init__(harness, Workload([]), vocab=vocab, wrap_plan=self._note_plan, wrap_outputs=self._note_outputs)
        self.plans: list[Any] = []
        self.first_token: dict[str, int] = {}
        self.end: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.preempted: dict[str, int] = {}
        self.cached: dict[str, int] = {}

    def submit(self, request_id: str, prompt: int | list[int], max_tokens: int, **fields: Any) -> Arrival:
        """Adds a request now; an integer prompt is that many tokens shared with nobody."""
        if isinstance(prompt, int):
            prompt = words(hash_of(request_id), prompt)
        arrival = Arrival(self.report.ticks, request_id, prompt, max_tokens, **fields)
        self.add(arrival)
        return arrival

    def ticks(self, count: int) -> None:
        """Runs some ticks."""
        for _ in range(count):
            self.tick()

    def finish(self, max_ticks: int = 2_000) -> None:
        """Runs to the end and checks that nothing is left behind."""
        self.run(self.report.ticks + max_ticks)

    def outcome(self, request_id: str) -> str | None:
        """How a request ended, None while it is open."""
        return self.ledger.accounts[request_id].outcome

    def delivered(self, request_id: str) -> int:
        """Output tokens a request has got."""
        return self.ledger.accounts[request_id].num_delivered

    def scheduled_ticks(self, request_id: str) -> list[int]:
        """Ticks in which a request ran."""
        return [tick for tick, plan in enumerate(self.plans) if request_id in plan.num_scheduled_tokens]

    def _note_plan(self, plan: Any) -> Any:
        while len(self.plans) < self.report.ticks:
            self.plans.append(plan.make_empty())
        self.plans.append(plan)
        for request_id, count in plan.num_scheduled_tokens.items():
            self.computed[request_id] = self.computed.get(request_id, 0) + count
        for request_id in plan.preempted_req_ids or ():
            self.preempted[request_id] = self.preempted.get(request_id, 0) + 1
        return plan

    def _note_outputs(self, outputs: Any) -> Any:
        for batch in outputs.values():
            for output in batch.outputs:
                if output.new_token_ids:
                    self.first_token.setdefault(output.request_id, self.report.ticks)
                if output.finish_reason is not None:
                    self.end[output.request_id] = self.report.ticks
                if output.prefill_stats is not None:
                    self.cached[output.request_id] = output.prefill_stats.num_cached_tokens
        return outputs


def hash_of(request_id: str) -> int:
    """A stream of words for a request id, the same in every process."""
    return 5_000 + sum(ord(letter) * 257**index for index, letter in enumerate(request_id)) % 1_000_003
