# SPDX-License-Identifier: Apache-2.0
"""Residual sums that are left to the norm behind them: one kernel reads both operands and writes the sum and its norm.

That is what vLLM's own layers do, so it is needed for equal speed, and in 16 bits for equal tokens: the norm sees the sum
before it is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from tokenspeed_plugin.placement.plan import Compute, Move, SectionPlan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from tokenspeed_plugin.placement.module_spec import Signature

WAITING: Final = "waiting"
"""Buffer of the second operand of a sum that the section before left open; the first lies in the entry buffer."""


class ResidualAdd:
    """The sum of two values; the first one is the residual stream."""

    def __call__(self, *inputs: torch.Tensor, signature: Signature, step: Any) -> torch.Tensor:  # noqa: ARG002
        """``inputs[0] + inputs[1]``."""
        return inputs[0] + inputs[1]


@runtime_checkable
class AddNorm(Protocol):
    """A norm that can take a residual sum with it."""

    def add_norm(self, residual: torch.Tensor, branch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(residual + branch), residual + branch)``; both inputs may be overwritten."""
        ...


@dataclass(frozen=True)
class Sum:
    """An addition that a norm does: buffers of residual and branch, and of the sum."""

    reads: tuple[str, ...]
    target: str


def sums_before_norms(
    plan: SectionPlan, modules: Mapping[str, Any], *, takes_sum: bool, leaves_sum: bool
) -> tuple[list[Move | Compute], dict[int, Sum]]:
    """The steps without the additions that norms take over, and for the index of each such norm what it adds."""
    steps = list(plan.steps[:-1] if leaves_sum else plan.steps)
    taken: dict[str, Sum] = {}
    if takes_sum:
        taken[plan.entry_buffer] = Sum((plan.entry_buffer, WAITING), plan.entry_buffer)
    for index, step in enumerate(steps):
        if _is_add(step, modules) and _can_take(steps, index, modules, plan.exit_buffer):
            taken[step.target] = Sum(step.reads, step.target)  # type: ignore[union-attr]
    kept = [s for s in steps if not (_is_add(s, modules) and s.target in taken)]
    sums: dict[int, Sum] = {}
    for target, sum_ in taken.items():
        reader = next(i for i, step in enumerate(kept) if target in _reads(step))
        sums[reader] = sum_
    return kept, sums


def leaves_open(plan: SectionPlan, modules: Mapping[str, Any]) -> bool:
    """Whether the last thing that a section does is the sum which is its result."""
    last = plan.steps[-1] if plan.steps else None
    return last is not None and _is_add(last, modules) and last.target == plan.exit_buffer


def takes_open(plan: SectionPlan, modules: Mapping[str, Any]) -> bool:
    """Whether the first thing that reads the stream is a norm that can add."""
    first = next((step for step in plan.steps if plan.entry_buffer in _reads(step)), None)
    return isinstance(first, Compute) and isinstance(modules.get(first.module), AddNorm)


def _can_take(steps: Sequence[Move | Compute], index: int, modules: Mapping[str, Any], result: str) -> bool:
    """Whether a norm reads the sum first, and nothing else reads the operands, which it may overwrite."""
    added = steps[index]
    behind = steps[index + 1 :]
    reader = next((step for step in behind if added.target in _reads(step)), None)
    operands = set(_reads(added))
    used_again = result in operands or any(operands & set(_reads(step)) for step in behind)
    takes = isinstance(reader, Compute) and isinstance(modules.get(reader.module), AddNorm)
    return takes and not used_again and len(operands) == 2


def _is_add(step: Move | Compute, modules: Mapping[str, Any]) -> bool:
    return isinstance(step, Compute) and isinstance(modules.get(step.module), ResidualAdd)


def _reads(step: Move | Compute) -> tuple[str, ...]:
    return (step.source,) if isinstance(step, Move) else step.reads
