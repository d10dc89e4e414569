# SPDX-License-Identifier: Apache-2.0
"""From declarations to a plan: where to convert layouts, and which collectives that takes.

Inside a section the search is exact dynamic programming over the modules in order. A state says in which layouts every
live value exists. Converting leaves the old copy usable, so a reduction is made once and late: two Partial values that
are added stay Partial, and what only a token-sharded consumer reads is reduce-scattered, never all-reduced. Sections are
chained by the layout of the residual stream, so a reduction may also wait across a layer boundary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from tokenspeed_plugin.placement.algebra import TOKENS, Conversion, IllegalConversionError, Partial, PlacementError
from tokenspeed_plugin.placement.cost.cost_model import TOKENWISE
from tokenspeed_plugin.placement.demand import Demand, MoveBook
from tokenspeed_plugin.placement.fusion import mark_fusions
from tokenspeed_plugin.placement.graph import STREAM, ModelGraph, Node, Section
from tokenspeed_plugin.placement.layout import Layout, partial_atoms, spread, text
from tokenspeed_plugin.placement.module_spec import ModuleKind, Signature
from tokenspeed_plugin.placement.plan import Compute, ModelPlan, Move, SectionPlan, buffer_name
from tokenspeed_plugin.placement.residual import Residual

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenspeed_plugin.placement.cost.cost_model import CostModel
    from tokenspeed_plugin.placement.mesh import Mesh

Copies: TypeAlias = frozenset[tuple[str, Layout]]
Steps: TypeAlias = tuple[Move | Compute, ...]

MAX_STATES: Final = 64
"""More states than this are live only when groups overlap in three ways or more; the cheapest ones are then kept."""


@dataclass(frozen=True)
class _State:
    """Live copies, the cost so far and the steps that led here."""

    copies: Copies
    cost_us: float
    steps: Steps


class Compiler:
    """Compiles one graph for steps of the size that ``cost`` describes."""

    def __init__(self, cost: CostModel, residual: Residual = Residual.AUTO) -> None:
        self._cost = cost
        self._graph: ModelGraph = cost.graph
        self._mesh = cost.mesh
        self._residual = residual
        self._book = MoveBook(cost)
        self._allowed = allowed_sets(self._mesh)

    def compile(self) -> ModelPlan:
        """The cheapest legal plan.

        Raises:
            IllegalConversionError: two neighbours cannot be connected; names both modules and the axis.
        """
        start = spread(self._mesh, {"dp": TOKENS})
        frontier: dict[Layout, tuple[float, tuple[SectionPlan, ...]]] = {start: (0.0, ())}
        tables: dict[tuple[str, Layout], dict[Layout, tuple[float, SectionPlan]]] = {}
        for name in self._graph.order:
            reached: dict[Layout, tuple[float, tuple[SectionPlan, ...]]] = {}
            for entry, (spent, chain) in frontier.items():
                key = (name, entry)
                if key not in tables:
                    tables[key] = self._section(self._graph.sections[name], entry)
                for leave, (cost, plan) in tables[key].items():
                    total = spent + cost
                    if leave not in reached or total < reached[leave][0]:
                        reached[leave] = (total, (*chain, plan))
            frontier = self._worth_keeping(self._graph.sections[name], reached)
        _, chain = min(frontier.values(), key=lambda item: item[0])
        return ModelPlan(self._mesh, self._cost.num_tokens, self._cost.num_rows, mark_fusions(self._graph, chain))

    def _worth_keeping(
        self, section: Section, reached: dict[Layout, tuple[float, tuple[SectionPlan, ...]]]
    ) -> dict[Layout, tuple[float, tuple[SectionPlan, ...]]]:
        """Drop a layout that is dearer than reaching another one and converting it."""
        port = section.port(section.result)
        kept: dict[Layout, tuple[float, tuple[SectionPlan, ...]]] = {}
        for layout, (total, chain) in sorted(reached.items(), key=lambda item: (item[1][0], text(item[0]))):
            if not any(
                cost + self._book.conversion_us(port, other, layout) <= total for other, (cost, _) in kept.items()
            ):
                kept[layout] = (total, chain)
        return kept

    def _section(self, section: Section, entry: Layout) -> dict[Layout, tuple[float, SectionPlan]]:
        """For every layout in which the section can leave the stream, the cheapest plan."""
        states = {frozenset({(STREAM, entry)}): _State(frozenset({(STREAM, entry)}), 0.0, ())}
        last_use = section.last_use()
        for index, node in enumerate(section.nodes):
            alive = {v for v, last in last_use.items() if last > index}
            states = self._advance(section, node, states, alive)
        best: dict[Layout, tuple[float, SectionPlan]] = {}
        for state in states.values():
            for value, layout in sorted(state.copies, key=_order):
                if value == section.result and (layout not in best or state.cost_us < best[layout][0]):
                    plan = SectionPlan(
                        section.name,
                        entry,
                        layout,
                        buffer_name(STREAM, entry),
                        buffer_name(value, layout),
                        state.steps,
                    )
                    best[layout] = (state.cost_us, plan)
        return best

    def _advance(
        self, section: Section, node: Node, states: Mapping[Copies, _State], alive: set[str]
    ) -> dict[Copies, _State]:
        reached: dict[Copies, _State] = {}
        failure: IllegalConversionError | None = None
        signatures = [
            s
            for s in node.spec.signatures(self._mesh)
            if self._residual.allows(self._mesh, node.spec, s) and self._worth_trying(section, node, s)
        ]
        for state in states.values():
            for signature in signatures:
                try:
                    after = self._run(section, node, state, signature, alive)
                except IllegalConversionError as error:
                    failure = failure or error
                    continue
                known = reached.get(after.copies)
                if known is None or after.cost_us < known.cost_us:
                    reached[after.copies] = after
        if not reached:
            raise failure or PlacementError(
                f"module {node.spec.name!r} has no signature under residual={self._residual}"
            )
        return _undominated(reached)

    def _worth_trying(self, section: Section, node: Node, signature: Signature) -> bool:
        """Norms and adds split or stay partial over whole groups; mixtures of pieces of groups never win.

        A residual sum is not handed on as Partial: many layers added up in parts of 16 bits lose what one sum keeps.
        """
        if node.spec.kind not in TOKENWISE:
            return True
        inside = self._mesh.atoms("attn_tp")
        split = frozenset(a for a in inside if signature.output[a] == TOKENS)
        if node.spec.kind is ModuleKind.ADD and node.spec.name == section.result:
            whole = self._residual is Residual.SHARDED and split != frozenset(inside)
            if whole or partial_atoms(signature.output):
                return False
        waiting = frozenset(a for a in inside if isinstance(signature.output[a], Partial))
        return split in self._allowed and waiting in self._allowed

    def _run(self, section: Section, node: Node, state: _State, signature: Signature, alive: set[str]) -> _State:
        """Bring the inputs into the layouts of ``signature`` and run the module."""
        copies, cost, steps = state.copies, state.cost_us, list(state.steps)
        for index, layout in enumerate(signature.inputs):
            demand = Demand(section, node, index, layout)
            held = sorted((own for name, own in copies if name == demand.value), key=text)
            moves = self._book.cheapest(demand, held)
            cost += sum(m.time_us for m in moves) - self._fusion_saving(demand, moves)
            steps += moves
            copies |= {(demand.value, m.after) for m in moves}
        compute_us = self._cost.compute_us(node.spec, signature)
        reads = tuple(buffer_name(r, s) for r, s in zip(node.reads, signature.inputs, strict=True))
        target = buffer_name(node.spec.name, signature.output)
        steps.append(Compute(node.spec.name, reads, target, signature, compute_us))
        kept = frozenset(c for c in copies if c[0] in alive)
        if node.spec.name in alive:
            kept |= {(node.spec.name, signature.output)}
        return _State(kept, cost + compute_us, tuple(steps))

    def _fusion_saving(self, demand: Demand, moves: tuple[Move, ...]) -> float:
        """What one kernel saves: an all-reduce with the add or norm that reads it, or an add with its norm."""
        kind = demand.node.spec.kind
        if kind not in TOKENWISE:
            return 0.0
        if moves and moves[-1].kind is Conversion.ALL_REDUCE:
            return self._cost.fused_saving_us(demand.carried, demand.layout, self._mesh.size(moves[-1].atoms))
        added = demand.value == STREAM or demand.section.node(demand.value).spec.kind is ModuleKind.ADD
        if moves or not added or kind is not ModuleKind.NORM:
            return 0.0
        return self._cost.fused_saving_us(demand.carried, demand.layout)


def allowed_sets(mesh: Mesh) -> frozenset[frozenset[int]]:
    """Sets of attention atoms that are a group: none, all, and what each other axis has inside or outside of them."""
    inside = frozenset(mesh.atoms("attn_tp"))
    others = [frozenset(atoms) & inside for _, atoms in mesh.axes]
    return frozenset({frozenset(), inside, *others, *(inside - own for own in others)})


def _undominated(states: Mapping[Copies, _State]) -> dict[Copies, _State]:
    """Drop a state when another one has all of its copies and more, for no more time; keep at most MAX_STATES."""
    kept: dict[Copies, _State] = {}
    for copies, state in sorted(states.items(), key=lambda item: item[1].cost_us):
        if not any(copies <= other for other in kept):
            kept[copies] = state
        if len(kept) == MAX_STATES:
            break
    return kept


def _order(copy: tuple[str, Layout]) -> tuple[str, str]:
    """Ties are broken alike on every rank, whatever the hash seed."""
    return copy[0], text(copy[1])
