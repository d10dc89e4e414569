# SPDX-License-Identifier: Apache-2.0
"""One section of a plan as a list of closures over numbered slots: no look-up by name is left when it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tokenspeed_plugin.placement.algebra import Conversion
from tokenspeed_plugin.placement.plan import Compute, Move, SectionPlan
from tokenspeed_plugin.placement.runtime.open_linear import open_writer
from tokenspeed_plugin.placement.runtime.residual_sum import WAITING, OpenSum, Sum, open_operands, sums_before_norms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tokenspeed_plugin.placement.mesh import Mesh
    from tokenspeed_plugin.placement.module_spec import Signature
    from tokenspeed_plugin.placement.runtime.communicator import Communicator
    from tokenspeed_plugin.placement.runtime.open_linear import OpenModule


class Module(Protocol):
    """What computes a declared module on this rank; it communicates nothing.

    ``signature`` says in which layouts the inputs come and the output is expected; ``step`` is what the caller of the model
    hands to every module (positions, for vLLM's attention).
    """

    def __call__(self, *inputs: torch.Tensor, signature: Signature, step: Any) -> torch.Tensor:
        """The output for ``inputs``, which it leaves unchanged."""
        ...


@dataclass(frozen=True)
class _Instruction:
    """``run(step, *slots[sources])`` fills ``targets``; then ``dead`` slots are let go."""

    run: Callable[..., Any]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    dead: tuple[int, ...]


class CompiledDecoderLayer:
    """Pre-communication, compute and post-communication of one section on this rank.

    A residual sum that a norm reads first is left to the norm, which does both in one kernel. The last sum of a section
    may wait for the norm of the next one (``leaves`` there, ``takes`` here): the stream then travels as two values.
    ``reductions`` are the all-reduces that norms take over as well, by the buffer that they would fill. With ``overlaps``, which the communicator
    must be able to, they take the linear layer in front of the all-reduce, too: the buffer then has what that layer reads.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        plan: SectionPlan,
        modules: Mapping[str, Module],
        communicator: Communicator,
        *,
        takes: OpenSum | None = None,
        leaves: OpenSum | None = None,
        reductions: Mapping[str, Move] | None = None,
        overlaps: bool = False,
    ) -> None:
        self._mesh = mesh
        self._rank = rank
        self._communicator = communicator
        steps, sums = sums_before_norms(plan, modules, takes=takes, leaves=leaves, reductions=reductions)
        slots = _slots(plan, steps, sums)
        results = open_operands(plan, reductions or {}) if leaves else (plan.exit_buffer,)
        if overlaps:
            sums = {index: _with_writer(sum_, steps, modules) for index, sum_ in sums.items()}
        self._open = {sum_.reads[-1] for sum_ in sums.values() if sum_.writer is not None}
        if leaves is not None and leaves.writer is not None:
            self._open.add(results[-1])
        self._num_slots = len(slots)
        self._results = tuple(slots[name] for name in results)
        sources = [tuple(slots[name] for name in _reads(s, sums.get(i))) for i, s in enumerate(steps)]
        dead = _last_reads(sources, keep=self._results)
        self._instructions = tuple(
            _Instruction(
                self._bind(step, modules, sums.get(index)),
                sources[index],
                tuple(slots[name] for name in _writes(step, sums.get(index))),
                dead[index],
            )
            for index, step in enumerate(steps)
        )

    def __call__(self, stream: tuple[torch.Tensor, ...], step: Any = None) -> tuple[torch.Tensor, ...]:
        """The stream after this section, in the layout that the plan gives: one value, or two whose sum it is."""
        slots: list[Any] = [None] * self._num_slots
        for slot, value in enumerate(stream):
            slots[slot] = value
        for instruction in self._instructions:
            written = instruction.run(step, *[slots[s] for s in instruction.sources])
            if len(instruction.targets) == 1:
                slots[instruction.targets[0]] = written
            else:
                slots[instruction.targets[0]], slots[instruction.targets[1]] = written
            for slot in instruction.dead:
                slots[slot] = None
        return tuple([slots[slot] for slot in self._results])

    def _bind(self, step: Move | Compute, modules: Mapping[str, Module], sum_: Sum | None) -> Callable[..., Any]:
        if isinstance(step, Move):
            move = self._bind_move(step)
            return lambda _, tensor: move(tensor)
        module, signature = modules[step.module], step.signature
        if sum_ is not None and sum_.atoms is not None:
            return self._bind_fused(sum_.atoms, module, sum_.writer)
        if sum_ is not None:
            return lambda _, residual, branch: module.add_norm(residual, branch)  # type: ignore[attr-defined]
        run: Any = module.without_linear if step.target in self._open else module  # type: ignore[attr-defined]
        return lambda own, *inputs: run(*inputs, signature=signature, step=own)

    def _bind_fused(self, atoms: tuple[int, ...], norm: Any, writer: OpenModule | None) -> Callable[..., Any]:
        """All-reduce of the last operand, the sum, and its norm; the norm's numbers are read when it runs."""
        talk: Any = self._communicator
        if writer is None:
            return lambda _, *operands: talk.all_reduce_add_norm(
                operands[-1], operands[0] if len(operands) == 2 else None, norm.rms_norm(), atoms
            )
        return lambda _, *operands: talk.linear_all_reduce_add_norm(
            operands[-1], writer.linear(), operands[0] if len(operands) == 2 else None, norm.rms_norm(), atoms
        )

    def _bind_move(self, move: Move) -> Callable[[torch.Tensor], torch.Tensor]:
        talk, atoms, op = self._communicator, move.atoms, move.op or "sum"
        dim, from_dim = move.dim or 0, move.from_dim or 0
        position, count = self._mesh.index(self._rank, atoms), self._mesh.size(atoms)
        neutral = 0.0 if op == "sum" else float("-inf")
        # A slice is a copy: what reads it may overwrite it, and the whole may be read again.
        return {
            Conversion.ALL_REDUCE: lambda t: talk.all_reduce(t, atoms, op),
            Conversion.REDUCE_SCATTER: lambda t: talk.reduce_scatter(t, atoms, dim, op),
            Conversion.ALL_GATHER: lambda t: talk.all_gather(t, atoms, dim),
            Conversion.ALL_TO_ALL: lambda t: talk.all_to_all(t, atoms, from_dim, dim),
            Conversion.SLICE: lambda t: t.narrow(dim, t.shape[dim] // count * position, t.shape[dim] // count).clone(),
            Conversion.KEEP_FIRST: lambda t: t if position == 0 else torch.full_like(t, neutral),
        }[move.kind]


def _slots(plan: SectionPlan, steps: list[Move | Compute], sums: Mapping[int, Sum]) -> dict[str, int]:
    """A number for each buffer; the stream comes in the first one, or the first two."""
    slots = {plan.entry_buffer: 0, WAITING: 1}
    for name in (*(step.target for step in steps), *(sum_.target for sum_ in sums.values())):
        slots.setdefault(name, len(slots))
    return slots


def _with_writer(sum_: Sum, steps: list[Move | Compute], modules: Mapping[str, Module]) -> Sum:
    """With the module of this section, if it is one, that can leave the last operand's linear layer to the sum."""
    if sum_.atoms is None or sum_.writer is not None:
        return sum_
    return replace(sum_, writer=open_writer(steps, sum_.reads[-1], modules))


def _reads(step: Move | Compute, sum_: Sum | None = None) -> tuple[str, ...]:
    return (sum_ or step).reads


def _writes(step: Move | Compute, sum_: Sum | None) -> tuple[str, ...]:
    return (step.target,) if sum_ is None else (step.target, sum_.target)


def _last_reads(sources: list[tuple[int, ...]], keep: tuple[int, ...]) -> list[tuple[int, ...]]:
    """For each instruction the slots that nothing after it reads."""
    last = {slot: index for index, read in enumerate(sources) for slot in read}
    return [tuple(s for s, at in last.items() if at == index and s not in keep) for index in range(len(sources))]
