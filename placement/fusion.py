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
        if step.kind not in (Conversion.ALL_REDUCE, Conversion.REDUCE_SCATTER):
            continue
        found = _after_reduction(graph, plan, index, opens_with_norm=opens_with_norm)
        if found is not None:
            yield found


def _after_reduction(graph: ModelGraph, plan: SectionPlan, index: int, *, opens_with_norm: bool) -> Fusion | None:
    """All-reduce, or reduce-scatter ... all-gather, around an optional residual add and a norm."""
    reduction = plan.steps[index]
    chain = [index]
    add = _reader(graph, plan, reduction.target, (ModuleKind.ADD,))
    crosses = False
    value = reduction.target
    if add is not None:
        chain.append(add)
        value = plan.steps[add].target
        crosses = value == plan.exit_buffer and opens_with_norm
    norm = _reader(graph, plan, value, (ModuleKind.NORM,))
    if norm is not None:
        chain.append(norm)
    elif not crosses:
        return None
    if isinstance(reduction, Move) and reduction.kind is Conversion.ALL_REDUCE:
        kind = FusionKind.ALL_REDUCE_NORM if add is None else FusionKind.ALL_REDUCE_ADD_NORM
        return Fusion(kind, tuple(chain), crosses)
    gather = _gather_of(plan, plan.steps[norm].target) if norm is not None else None
    if gather is not None:
        chain.append(gather)
    return Fusion(FusionKind.SHARDED_NORM, tuple(chain), crosses)


def _reader(graph: ModelGraph, plan: SectionPlan, buffer: str, kinds: tuple[ModuleKind, ...]) -> int | None:
    for index, step in enumerate(plan.steps):
        if isinstance(step, Compute) and buffer in step.reads and _kind(graph, plan, step.module) in kinds:
            return index
    return None


def _gather_of(plan: SectionPlan, buffer: str) -> int | None:
    for index, step in enumerate(plan.steps):
        if isinstance(step, Move) and step.source == buffer and step.kind is Conversion.ALL_GATHER:
            return index
    return None
