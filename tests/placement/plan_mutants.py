# SPDX-License-Identifier: Apache-2.0
"""Every way to spoil one step of a plan that the verifier has to notice."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from tokenspeed_plugin.placement import Conversion, ModelGraph, ModelPlan, ModuleKind, Partial, SectionPlan
from tokenspeed_plugin.placement.plan import Compute, Move

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenspeed_plugin.placement.mesh import Mesh

REDUCTIONS = (Conversion.ALL_REDUCE, Conversion.REDUCE_SCATTER)


def mutants(graph: ModelGraph, plan: ModelPlan) -> Iterator[tuple[str, SectionPlan]]:
    """Each mutant of a section of ``plan``, with a name that says what was done where."""
    for section in dict.fromkeys(plan.sections):
        for what, changed in section_mutants(graph, plan.mesh, section):
            yield f"{section.section}: {what}", changed


def section_mutants(graph: ModelGraph, mesh: Mesh, section: SectionPlan) -> Iterator[tuple[str, SectionPlan]]:
    for index, step in enumerate(section.steps):
        if isinstance(step, Move):
            yield from move_mutants(mesh, section, index, step)
        else:
            yield f"module {step.module} left out", without(section, index, step.target, step.reads[0])
            yield from norm_mutants(graph, section, index, step)


def move_mutants(mesh: Mesh, section: SectionPlan, index: int, move: Move) -> Iterator[tuple[str, SectionPlan]]:
    name = f"{move.kind.value} of {move.value}"
    yield f"{name} dropped", without(section, index, move.target, move.source)
    if move.kind is not Conversion.KEEP_FIRST:
        again = replace(move, source=move.target, target=f"{move.target} again")
        yield f"{name} doubled", inserted(section, index + 1, again)
    for atoms in subsets(len(mesh.atom_sizes)):
        if atoms != move.atoms:
            yield f"{name} over atoms {atoms}", swapped(section, index, replace(move, atoms=atoms))
    if move.dim is not None:
        yield f"{name} along the other dimension", swapped(section, index, replace(move, dim=1 - move.dim))
    if move.kind in REDUCTIONS:
        yield f"{name} as a maximum", swapped(section, index, replace(move, op="max"))


def norm_mutants(
    graph: ModelGraph, section: SectionPlan, index: int, step: Compute
) -> Iterator[tuple[str, SectionPlan]]:
    """A norm that reads its input before the reduction, as it is or declared Partial."""
    if graph.sections[section.section].node(step.module).spec.kind is not ModuleKind.NORM:
        return
    for move in section.moves:
        if move.kind in REDUCTIONS and step.reads == (move.target,):
            early = replace(step, reads=(move.source,))
            yield f"{step.module} before {move.kind.value}", swapped(section, index, early)
            partial = tuple(Partial() if a in move.atoms else p for a, p in enumerate(step.signature.inputs[0]))
            signature = replace(step.signature, inputs=(partial,))
            yield f"{step.module} on Partial", swapped(section, index, replace(early, signature=signature))


def subsets(num_atoms: int) -> list[tuple[int, ...]]:
    return [c for size in range(num_atoms + 1) for c in itertools.combinations(range(num_atoms), size)]


def swapped(section: SectionPlan, index: int, step: Move | Compute) -> SectionPlan:
    return replace(section, steps=(*section.steps[:index], step, *section.steps[index + 1 :]))


def inserted(section: SectionPlan, index: int, move: Move) -> SectionPlan:
    """``move`` as a new step; what read its source afterwards reads its target."""
    later = renamed(section, index, move.source, move.target)
    return replace(later, steps=(*later.steps[:index], move, *later.steps[index:]))


def without(section: SectionPlan, index: int, gone: str, instead: str) -> SectionPlan:
    later = renamed(section, index + 1, gone, instead)
    return replace(later, steps=(*later.steps[:index], *later.steps[index + 1 :]))


def renamed(section: SectionPlan, start: int, old: str, new: str) -> SectionPlan:
    """``section`` with every read of buffer ``old`` from step ``start`` on turned into one of ``new``."""
    steps = list(section.steps)
    for i in range(start, len(steps)):
        step = steps[i]
        if isinstance(step, Compute):
            steps[i] = replace(step, reads=tuple(new if r == old else r for r in step.reads))
        elif step.source == old:
            steps[i] = replace(step, source=new)
    leave = new if section.exit_buffer == old else section.exit_buffer
    return replace(section, steps=tuple(steps), exit_buffer=leave)
