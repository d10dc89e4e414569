# SPDX-License-Identifier: Apache-2.0
"""Marks steps that one kernel can do together. Marking changes nothing in the plan; a run-time may use any or none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tokenspeed_plugin.placement.algebra import Conversion
from tokenspeed_plugin.placement.graph import ModelGraph
from tokenspeed_plugin.placement.module_spec import ModuleKind
from tokenspeed_plugin.placement.plan import Compute, Fusion, FusionKind, Move, SectionPlan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def mark_fusions(graph: ModelGraph, chain: Sequence[SectionPlan]) -> tuple[SectionPlan, ...]:
    """The same plans with their fusions; a norm that opens the next section counts for the section before."""
    marked: list[SectionPlan] = []
    cache: dict[tuple[SectionPlan, str | None], SectionPlan] = {}
    for index, plan in enumerate(chain):
        follower = chain[index + 1] if index + 1 < len(chain) else None
        key = (plan, _opening_norm(graph, follower))
        if key not in cache:
            cache[key] = replace(plan, fusions=tuple(_fusions(graph, plan, opens_with_norm=key[1] is not None)))
        marked.append(cache[key])
    return tuple(marked)


def _opening_norm(graph: ModelGraph, plan: SectionPlan | None) -> str | None:
    """The norm that reads the stream as it arrives, if the section starts with one."""
    if plan is None or not plan.steps or not isinstance(first := plan.steps[0], Compute):
        return None
    is_norm = _kind(graph, plan, first.module) is ModuleKind.NORM
    return first.module if is_norm and first.reads == (plan.entry_buffer,) else None


def _kind(graph: ModelGraph, plan: SectionPlan, module: str) -> ModuleKind:
    return graph.sections[plan.section].node(module).spec.kind


def _fusions(graph: ModelGraph, plan: SectionPlan, *, opens_with_norm: bool) -> Iterator[Fusion]:
    for index, step in enumerate(plan.steps):
        if not isinstance(step, Move):
            continue
        if step.kind is Conversion.ALL_GATHER and step.wire_bytes is not None:
            yield Fusion(FusionKind.QUANTISED_GATHER, (index,))
        if step.kind not in (Conversion.ALL_REDUCE, Conversion.REDUCE_SCATTER) or step.op not in (None, "sum"):
            continue
        found = _after_reduction(graph, plan, index, opens_with_norm=opens_with_norm)
        if found is not None:
            yield found


def _after_reduction(graph: ModelGraph, plan: SectionPlan, index: int, *, opens_with_norm: bool) -> Fusion | None:
    """All-reduce, or reduce-scatter ... all-gather, around an optional residual add and a norm.

    The norm has to come first: it reads the reduced value before anything else does, or the sum of it and one other value,
    and then nothing else reads the reduced value. The operand of the reduction is read by nothing else at all.
    """
    reduction = plan.steps[index]
    readers = _readers(plan, reduction.target)
    if not readers or reduction.target == plan.exit_buffer or len(_readers(plan, reduction.reads[0])) > 1:
        return None
    chain = [index]
    kind = _step_kind(graph, plan, readers[0])
    crosses = False
    norm: int | None = readers[0] if kind is ModuleKind.NORM else None
    if kind is ModuleKind.ADD and len(readers) == 1:
        chain.append(readers[0])
        total = plan.steps[readers[0]].target
        behind = _readers(plan, total)
        crosses = total == plan.exit_buffer and not behind and opens_with_norm
        norm = behind[0] if behind and _step_kind(graph, plan, behind[0]) is ModuleKind.NORM else None
    if norm is None and not crosses:
        return None
    if norm is not None:
        chain.append(norm)
    if isinstance(reduction, Move) and reduction.kind is Conversion.ALL_REDUCE:
        fused = FusionKind.ALL_REDUCE_ADD_NORM if kind is ModuleKind.ADD else FusionKind.ALL_REDUCE_NORM
        return Fusion(fused, tuple(chain), crosses)
    gather = _gather_of(plan, plan.steps[norm].target) if norm is not None else None
    if gather is not None:
        chain.append(gather)
    return Fusion(FusionKind.SHARDED_NORM, tuple(chain), crosses)


def _readers(plan: SectionPlan, buffer: str) -> list[int]:
    """Steps that read a buffer, in order; one that reads it twice appears twice."""
    return [i for i, step in enumerate(plan.steps) for read in step.reads if read == buffer]


def _step_kind(graph: ModelGraph, plan: SectionPlan, index: int) -> ModuleKind | None:
    step = plan.steps[index]
    return _kind(graph, plan, step.module) if isinstance(step, Compute) else None


def _gather_of(plan: SectionPlan, buffer: str) -> int | None:
    for index, step in enumerate(plan.steps):
        if isinstance(step, Move) and step.source == buffer and step.kind is Conversion.ALL_GATHER:
            return index
    return None
