# SPDX-License-Identifier: Apache-2.0
"""Plans by step size: small steps and large ones have different best plans, neighbours mostly share one."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenspeed_plugin.placement.algebra import PlacementError
from tokenspeed_plugin.placement.compiler import Compiler
from tokenspeed_plugin.placement.residual import Residual
from tokenspeed_plugin.placement.verifier import verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenspeed_plugin.placement.cost import CostModel
    from tokenspeed_plugin.placement.plan import ModelPlan


@dataclass(frozen=True)
class PlanTable:
    """``plans[i]`` serves steps of up to ``limits_tokens[i]`` tokens."""

    limits_tokens: tuple[int, ...]
    plans: tuple[ModelPlan, ...]

    @classmethod
    def build(
        cls, cost_of: Callable[[int], CostModel], max_tokens: int, residual: Residual = Residual.AUTO
    ) -> PlanTable:
        """Compile for every power of two up to ``max_tokens`` and itself; equal plans share a range. All are verified.

        ``cost_of`` gives the cost model for a number of tokens.

        Raises:
            VerificationError: a plan does not compute the declared model.
        """
        limits: list[int] = []
        plans: list[ModelPlan] = []
        sizes = sorted({max_tokens, *(2**k for k in range(max_tokens.bit_length()) if 2**k <= max_tokens)})
        for num_tokens in sizes:
            cost = cost_of(num_tokens)
            plan = Compiler(cost, residual).compile()
            verify(cost.graph, plan)
            if plans and plans[-1].shape() == plan.shape():
                limits[-1] = num_tokens
            else:
                limits.append(num_tokens)
                plans.append(plan)
        return cls(tuple(limits), tuple(plans))

    def split(self, num_tokens: int) -> PlanTable:
        """The same plans, where none serves both steps of fewer than ``num_tokens`` and larger ones."""
        last = num_tokens - 1
        if last < 1 or last >= self.limits_tokens[-1] or last in self.limits_tokens:
            return self
        at = self.index(last)
        limits, plans = self.limits_tokens, self.plans
        return PlanTable((*limits[:at], last, *limits[at:]), (*plans[:at], plans[at], *plans[at:]))

    def index(self, num_tokens: int) -> int:
        """Which plan serves a step of ``num_tokens``.

        Raises:
            PlacementError: no tokens, or more than the table was built for.
        """
        if not 1 <= num_tokens <= self.limits_tokens[-1]:
            message = f"a step of {num_tokens} tokens: plans exist for 1 to {self.limits_tokens[-1]}"
            raise PlacementError(message)
        return bisect_left(self.limits_tokens, num_tokens)
