# SPDX-License-Identifier: Apache-2.0
"""Policies of other distributions in the place of ours: chunk budget, victim choice, queue order (docs/pacing.md)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenspeed_plugin.hooks import plugin_manager

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import Request
    from tokenspeed_plugin.scheduler_fsm._core import Core


@dataclass(frozen=True)
class Arrival:
    """A request that takes its place in the queue; a session's turn does so anew.

    Attributes:
        req_id: of the request.
        arrival_time_s: by the wall clock.
        priority: vLLM's; smaller is more urgent.
        num_prompt_tokens: the new part of it, for a session's turn.
        max_tokens: most tokens of the answer.
        session_id: what its client calls the conversation.
        extra_args: the client's `vllm_xargs`.
    """

    req_id: str
    arrival_time_s: float
    priority: int
    num_prompt_tokens: int
    max_tokens: int
    session_id: str | None
    extra_args: dict[str, Any]


class QueueOrder:
    """Gives requests their place in the queue by a function of another distribution."""

    def __init__(self, function: Callable[[Arrival], float]) -> None:
        self._function = function

    def rank(self, request: "Request") -> float:
        """The request's rank; the smallest is served first.

        Raises:
            ValueError: the function answered something that orders nothing.
        """
        params = request.sampling_params
        arrival = Arrival(
            req_id=request.request_id,
            arrival_time_s=request.arrival_time,
            priority=request.priority,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            session_id=request.session_id,
            extra_args=dict(params.extra_args or {}) if params is not None else {},
        )
        answer = self._function(arrival)
        if isinstance(answer, bool) or not isinstance(answer, int | float) or not math.isfinite(answer):
            msg = f"the queue order answered {answer!r} for request {request.request_id}; allowed: a finite number"
            raise ValueError(msg)
        return float(answer)


def install(core: "Core") -> QueueOrder | None:
    """Put the policies of other distributions in the place of ours.

    Returns:
        The queue order, None for ours: then nothing is asked when a request arrives.
    """
    hook = plugin_manager().hook
    budget, victims, order = (
        hook.tokenspeed_chunk_budget(),
        hook.tokenspeed_victim_choice(),
        hook.tokenspeed_queue_order(),
    )
    if budget is not None:
        core.set_chunk_budget(budget)
    if victims is not None:
        core.set_victim_choice(victims)
    return None if order is None else QueueOrder(order)
