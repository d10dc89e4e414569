# SPDX-License-Identifier: Apache-2.0
"""One section of a plan as a list of closures over numbered slots: no look-up by name is left when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from tokenspeed_plugin.placement.algebra import Conversion
from tokenspeed_plugin.placement.plan import Compute, Move, SectionPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tokenspeed_plugin.placement.mesh import Mesh
    from tokenspeed_plugin.placement.module_spec import Signature
    from tokenspeed_plugin.placement.runtime.communicator import Communicator


class Module(Protocol):
    """What computes a declared module on this rank; it communicates nothing.

    ``signature`` says in which layouts the inputs come and the output is expected.
    """

    def __call__(self, *inputs: torch.Tensor, signature: Signature) -> torch.Tensor:
        """The output for ``inputs``, which it leaves unchanged."""
        ...


@dataclass(frozen=True)
class _Instruction:
    """``slots[target] = run(slots[s] for s in sources)``; then ``dead`` slots are let go."""

    run: Callable[..., torch.Tensor]
    sources: tuple[int, ...]
    target: int
    dead: tuple[int, ...]


class CompiledDecoderLayer:
    """Pre-communication, compute and post-communication of one section on this rank."""

    def __init__(
        self, mesh: Mesh, rank: int, plan: SectionPlan, modules: Mapping[str, Module], communicator: Communicator
    ) -> None:
        self._mesh = mesh
        self._rank = rank
        self._communicator = communicator
        slots = {plan.entry_buffer: 0}
        for step in plan.steps:
            slots.setdefault(step.target, len(slots))
        self._num_slots = len(slots)
        self._result = slots[plan.exit_buffer]
        last_read = {slots[plan.exit_buffer]: len(plan.steps)}
        sources = [tuple(slots[name] for name in _reads(step)) for step in plan.steps]
        for index, read in enumerate(sources):
            for slot in read:
                last_read[slot] = max(index, last_read.get(slot, 0))
        self._instructions = tuple(
            _Instruction(
                self._bind(step, modules),
                sources[index],
                slots[step.target],
                tuple(slot for slot, last in last_read.items() if last == index),
            )
            for index, step in enumerate(plan.steps)
        )

    def __call__(self, stream: torch.Tensor) -> torch.Tensor:
        """The stream after this section, in the layout that the plan gives."""
        slots: list[torch.Tensor | None] = [None] * self._num_slots
        slots[0] = stream
        for instruction in self._instructions:
            slots[instruction.target] = instruction.run(*(slots[s] for s in instruction.sources))
            for slot in instruction.dead:
                slots[slot] = None
        result = slots[self._result]
        if result is None:
            message = "the plan's result was never computed; the verifier refuses such a plan"
            raise RuntimeError(message)
        return result

    def _bind(self, step: Move | Compute, modules: Mapping[str, Module]) -> Callable[..., torch.Tensor]:
        if isinstance(step, Compute):
            module, signature = modules[step.module], step.signature
            return lambda *inputs: module(*inputs, signature=signature)
        return self._bind_move(step)

    def _bind_move(self, move: Move) -> Callable[[torch.Tensor], torch.Tensor]:
        talk, atoms, op = self._communicator, move.atoms, move.op or "sum"
        dim, from_dim = move.dim or 0, move.from_dim or 0
        position, count = self._mesh.index(self._rank, atoms), self._mesh.size(atoms)
        neutral = 0.0 if op == "sum" else float("-inf")
        return {
            Conversion.ALL_REDUCE: lambda t: talk.all_reduce(t, atoms, op),
            Conversion.REDUCE_SCATTER: lambda t: talk.reduce_scatter(t, atoms, dim, op),
            Conversion.ALL_GATHER: lambda t: talk.all_gather(t, atoms, dim),
            Conversion.ALL_TO_ALL: lambda t: talk.all_to_all(t, atoms, from_dim, dim),
            Conversion.SLICE: lambda t: t.narrow(dim, t.shape[dim] // count * position, t.shape[dim] // count),
            Conversion.KEEP_FIRST: lambda t: t if position == 0 else torch.full_like(t, neutral),
        }[move.kind]


def _reads(step: Move | Compute) -> tuple[str, ...]:
    return (step.source,) if isinstance(step, Move) else step.reads
