# SPDX-License-Identifier: Apache-2.0
"""Residual sums that are left to the norm behind them: one kernel reads both operands and writes the sum and its norm.

That is what vLLM's own layers do, so it is needed for equal speed, and in 16 bits for equal tokens: the norm sees the sum
before it is rounded. Where the communicator has a kernel for it, the norm takes over the all-reduce of an operand, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, runtime_checkable

from tokenspeed_plugin.placement.plan import Compute, FusionKind, Move, SectionPlan
from tokenspeed_plugin.placement.runtime.open_linear import OpenModule, open_writer

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


class RmsNorm(NamedTuple):
    """What a kernel has to know of a norm: it multiplies by ``weight + weight_offset``."""

    weight: torch.Tensor | None
    epsilon: float
    weight_offset: float


@runtime_checkable
class KernelNorm(AddNorm, Protocol):
    """A norm that a kernel of another one can compute."""

    def rms_norm(self) -> RmsNorm | None:
        """What the kernel has to know; None when this norm is of another kind."""
        ...


@dataclass(frozen=True)
class Sum:
    """An addition that a norm does: buffers of residual and branch, and of the sum.

    With ``atoms`` the last buffer that is read is still Partial over them, and the norm reduces it. Such a sum may have
    one operand only: an all-reduce and a norm. ``writer``: that buffer has what its writer's last linear layer reads.
    """

    reads: tuple[str, ...]
    target: str
    atoms: tuple[int, ...] | None = None
    writer: OpenModule | None = None


@dataclass(frozen=True)
class OpenSum:
    """How the sum that a section leaves to the next one travels: with ``atoms`` its second operand is Partial over them.

    ``writer``: it is what its writer's last linear layer reads.
    """

    atoms: tuple[int, ...] | None = None
    writer: OpenModule | None = None


def sums_before_norms(
    plan: SectionPlan,
    modules: Mapping[str, Any],
    *,
    takes: OpenSum | None = None,
    leaves: OpenSum | None = None,
    reductions: Mapping[str, Move] | None = None,
) -> tuple[list[Move | Compute], dict[int, Sum]]:
    """The steps without the additions that norms take over, and for the index of each such norm what it adds.

    ``reductions``: all-reduces that norms take over as well, by the buffer that they would fill.
    """
    steps = list(plan.steps[:-1] if leaves else plan.steps)
    left = dict(reductions or {})
    taken: dict[str, Sum] = {}
    if takes is not None:
        taken[plan.entry_buffer] = Sum((plan.entry_buffer, WAITING), plan.entry_buffer, takes.atoms, takes.writer)
    for index, step in enumerate(steps):
        if _is_add(step, modules) and _can_take(steps, index, modules, plan.exit_buffer):
            taken[step.target] = Sum(*_operands(step, left))
        elif isinstance(step, Move) and step.target in left and not _is_operand(steps, step.target, modules):
            taken[step.target] = Sum((step.source,), step.target, step.atoms)
    # A reduction goes only where its sum has gone: what nobody takes over stays a step of its own.
    partial = {read for sum_ in taken.values() if sum_.atoms is not None for read in sum_.reads[-1:]}
    if leaves is not None:
        partial.update(open_operands(plan, left)[-1:])
    gone = {target for target, move in left.items() if move.source in partial}
    kept = [s for s in steps if not (s.target in gone or (_is_add(s, modules) and s.target in taken))]
    sums: dict[int, Sum] = {}
    for target, sum_ in taken.items():
        reader = next(i for i, step in enumerate(kept) if target in step.reads)
        sums[reader] = sum_
    return kept, sums


def open_operands(plan: SectionPlan, reductions: Mapping[str, Move]) -> tuple[str, ...]:
    """Buffers of the operands of the sum that a section leaves open."""
    return _operands(plan.steps[-1], reductions)[0]


def fused_reductions(
    plan: SectionPlan,
    modules: Mapping[str, Any],
    behind: Mapping[str, Any] | None,
    opening: str | None,
    *,
    overlaps: bool = False,
) -> tuple[dict[str, Move], OpenSum]:
    """All-reduces of a section that norms take over, by the buffer that they would fill, and what that makes of an open sum.

    ``behind`` and ``opening``: the modules of the next section and its first one, when it takes this section's sum.
    ``overlaps``: linear layers in front of the all-reduces are taken over, too.
    """
    found: dict[str, Move] = {}
    crossing = OpenSum()
    for fusion in plan.fusions:
        if fusion.kind not in (FusionKind.ALL_REDUCE_ADD_NORM, FusionKind.ALL_REDUCE_NORM):
            continue
        move, last = plan.steps[fusion.steps[0]], plan.steps[fusion.steps[-1]]
        norm = (behind or {}).get(opening or "") if fusion.crosses else modules.get(getattr(last, "module", ""))
        if not isinstance(move, Move) or not isinstance(norm, KernelNorm) or norm.rms_norm() is None:
            continue
        found[move.target] = move
        if fusion.crosses:
            crossing = OpenSum(move.atoms, open_writer(plan.steps, move.source, modules) if overlaps else None)
    return found, crossing


def _operands(
    add: Move | Compute, reductions: Mapping[str, Move]
) -> tuple[tuple[str, ...], str, tuple[int, ...] | None]:
    """Reads, target and axes of a sum; the operand that is still Partial comes last."""
    reads = sorted(add.reads, key=lambda name: name in reductions)
    move = reductions.get(reads[-1])
    if move is None:
        return add.reads, add.target, None
    return (*reads[:-1], move.source), add.target, move.atoms


def leaves_open(plan: SectionPlan, modules: Mapping[str, Any]) -> bool:
    """Whether the last thing that a section does is the sum which is its result."""
    last = plan.steps[-1] if plan.steps else None
    return last is not None and _is_add(last, modules) and last.target == plan.exit_buffer


def takes_open(plan: SectionPlan, modules: Mapping[str, Any]) -> bool:
    """Whether the first thing that reads the stream is a norm that can add."""
    first = next((step for step in plan.steps if plan.entry_buffer in step.reads), None)
    return isinstance(first, Compute) and isinstance(modules.get(first.module), AddNorm)


def _can_take(steps: Sequence[Move | Compute], index: int, modules: Mapping[str, Any], result: str) -> bool:
    """Whether a norm reads the sum first, and nothing else reads the operands, which it may overwrite."""
    added = steps[index]
    behind = steps[index + 1 :]
    reader = next((step for step in behind if added.target in step.reads), None)
    operands = set(added.reads)
    used_again = result in operands or any(operands & set(step.reads) for step in behind)
    takes = isinstance(reader, Compute) and isinstance(modules.get(reader.module), AddNorm)
    return takes and not used_again and len(operands) == 2


def _is_operand(steps: Sequence[Move | Compute], buffer: str, modules: Mapping[str, Any]) -> bool:
    """Whether the first reader of a buffer is an addition, or comes in the next section."""
    reader = next((step for step in steps if buffer in step.reads), None)
    return reader is None or _is_add(reader, modules)


def _is_add(step: Move | Compute, modules: Mapping[str, Any]) -> bool:
    return isinstance(step, Compute) and isinstance(modules.get(step.module), ResidualAdd)
