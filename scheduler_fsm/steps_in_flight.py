# SPDX-License-Identifier: Apache-2.0
"""Steps that were planned and whose results have not come back, found by the very object that vLLM hands back."""

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import SchedulerOutput
    from tokenspeed_plugin.scheduler_fsm._core import PlanColumns


class _Step(NamedTuple):
    output: "SchedulerOutput"
    number: int
    grammar_req_ids: list[str]


class StepsInFlight:
    """At most as many as vLLM queues (2 with asynchronous scheduling), oldest first."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()

    def add(self, output: "SchedulerOutput", plan: "PlanColumns") -> None:
        """Remember a step; an empty one has no results."""
        if plan.num_tokens > 0:
            self._steps.append(_Step(output, plan.step, plan.grammar_req_ids))

    def take(self, output: "SchedulerOutput") -> int | None:
        """The core's number of a step whose results came; None for an empty step and for results that come twice."""
        for index, step in enumerate(self._steps):
            if step.output is output:
                del self._steps[index]
                return step.number
        return None

    def grammar_req_ids(self, output: "SchedulerOutput") -> list[str]:
        """Requests that sample under a grammar in this step."""
        return next((step.grammar_req_ids for step in self._steps if step.output is output), [])
