# SPDX-License-Identifier: Apache-2.0
"""Proves a plan: on every rank every module gets what it declared, and every contribution is in the result exactly once.

The plan is run on :mod:`symbolic` tensors. The truth about a value comes from the declared graph alone: a module's output
is the sum of one term per participant of its Partial axes, a linear module's output is the sum of its inputs' truths.
A section is proven once for each pair of entry and exit layouts; sections then fit because their ends do.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from tokenspeed_plugin.placement.algebra import TOKENS, Partial, PlacementError
from tokenspeed_plugin.placement.graph import STREAM, ModelGraph, Node, Section
from tokenspeed_plugin.placement.layout import Layout, interval, partial_atoms, sharded_atoms, spread, text
from tokenspeed_plugin.placement.module_spec import Freedom, ModuleKind, Port
from tokenspeed_plugin.placement.plan import Compute, ModelPlan, Move, SectionPlan
from tokenspeed_plugin.placement.symbolic import Ranks, SymbolicError, SymbolicTensor, Term, apply_move, combine

if TYPE_CHECKING:
    from tokenspeed_plugin.placement.mesh import Mesh

Terms: TypeAlias = "Counter[Term]"


class VerificationError(PlacementError):
    """A plan that would compute something else than the declared model."""


def verify(graph: ModelGraph, plan: ModelPlan) -> None:
    """Check the declarations, the order of the sections and every distinct section plan.

    Raises:
        VerificationError: names the section, the module, the rank, what was declared and what arrives.
    """
    for module in graph.modules():
        module.check()
    if tuple(s.section for s in plan.sections) != graph.order:
        message = f"model {graph.name!r}: the plan's sections are not the declared ones in order"
        raise VerificationError(message)
    layout = spread(plan.mesh, {"dp": TOKENS})
    for section in plan.sections:
        if section.entry != layout:
            message = (
                f"section {section.section!r} expects the stream as {text(section.entry)}, it comes as {text(layout)}"
            )
            raise VerificationError(message)
        layout = section.exit
    for section, _ in plan.distinct():
        verify_section(graph, plan, section)


def verify_section(graph: ModelGraph, plan: ModelPlan, section: SectionPlan) -> None:
    """Check one section plan on the mesh and for the sizes of ``plan``.

    Raises:
        VerificationError: as :func:`verify`.
    """
    _SectionProof(graph, plan, section).run()


class _SectionProof:
    """One section: buffers on all ranks, and the truth about every value."""

    def __init__(self, graph: ModelGraph, plan: ModelPlan, section_plan: SectionPlan) -> None:
        self._graph = graph
        self._mesh: Mesh = plan.mesh
        self._plan = plan
        self._section_plan = section_plan
        self._section: Section = graph.sections[section_plan.section]
        self._ranks = range(self._mesh.world_size)
        self._truth: dict[str, Terms] = {STREAM: self._fresh_truth(STREAM, section_plan.entry)}
        self._buffers: dict[str, Ranks] = {
            section_plan.entry_buffer: self._produce(STREAM, self._section.stream, section_plan.entry)
        }

    def run(self) -> None:
        """Run all steps, then check that the declared modules ran once, in order, and the exit value is whole."""
        executed: list[str] = []
        for step in self._section_plan.steps:
            if isinstance(step, Move):
                self._move(step)
            else:
                self._compute(step)
                executed.append(step.module)
        declared = [node.spec.name for node in self._section.nodes]
        if executed != declared:
            self._fail("plan", f"runs modules {executed}, declared are {declared}")
        leave = self._section_plan.exit
        self._arrives("exit", self._section.result, self._buffer("exit", self._section_plan.exit_buffer), leave)

    def _move(self, move: Move) -> None:
        try:
            moved = apply_move(self._mesh, move, self._buffer(move.module, move.source))
        except SymbolicError as error:
            self._fail(move.module, str(error))
        self._buffers[move.target] = moved

    def _compute(self, step: Compute) -> None:
        node = next((n for n in self._section.nodes if n.spec.name == step.module), None)
        if node is None:
            self._fail(step.module, "is not declared in this section")
        if len(step.reads) != len(node.reads):
            self._fail(step.module, f"reads {len(step.reads)} buffers, declared are {len(node.reads)} inputs")
        if step.signature not in set(node.spec.signatures(self._mesh)):
            shown = " ".join(text(s) for s in (*step.signature.inputs, step.signature.output))
            self._fail(step.module, f"runs as {shown}, which it does not declare")
        inputs = [self._buffer(step.module, read) for read in step.reads]
        for value, ranks, layout in zip(node.reads, inputs, step.signature.inputs, strict=True):
            self._arrives(step.module, value, ranks, layout)
        self._buffers[step.target] = self._outcome(node, step, inputs)

    def _outcome(self, node: Node, step: Compute, inputs: list[Ranks]) -> Ranks:
        """Output buffers, and the truth about the output."""
        name, layout = node.spec.name, step.signature.output
        if node.spec.freedom is not Freedom.LINEAR:
            self._truth[name] = self._fresh_truth(name, layout)
            return self._produce(name, node.spec.output, layout)
        self._truth[name] = _linear(node, [self._truth[read] for read in node.reads])
        return tuple(
            SymbolicTensor.of(inputs[0][rank].region, _linear(node, [ranks[rank].counts for ranks in inputs]))
            for rank in self._ranks
        )

    def _arrives(self, module: str, value: str, ranks: Ranks, layout: Layout) -> None:
        """Every rank holds its part of ``value`` under ``layout``, and Partial parts combine to all of it."""
        if value not in self._truth:
            self._fail(module, f"gets {value!r}, which has not been computed")
        port = self._section.port(value)
        for rank in self._ranks:
            wanted = self._region(port, layout, rank)
            if ranks[rank].region != wanted:
                self._fail(module, f"rank {rank} gets part {ranks[rank].region} of {value!r}, declared is {wanted}")
        partial = partial_atoms(layout)
        for group in self._mesh.groups(partial):
            op = next((p.op for p in (layout[a] for a in partial) if isinstance(p, Partial)), "sum")
            try:
                held = combine([ranks[rank] for rank in group], op)
            except SymbolicError as error:
                self._fail(module, f"rank {group[0]}: {error}")
            if held != self._truth[value]:
                self._fail(
                    module, f"rank {group[0]} gets {value!r} as {_show(held)}, declared is {_show(self._truth[value])}"
                )

    def _fresh_truth(self, symbol: str, layout: Layout) -> Terms:
        atoms = partial_atoms(layout)
        sites = product(*(range(self._mesh.atom_sizes[a]) for a in atoms))
        return Counter({Term(symbol, site, _op(layout, atoms)): 1 for site in sites})

    def _produce(self, symbol: str, port: Port, layout: Layout) -> Ranks:
        atoms = partial_atoms(layout)
        ranks = []
        for rank in self._ranks:
            site = tuple(self._mesh.coordinates(rank)[a] for a in atoms)
            term = Term(symbol, site, _op(layout, atoms))
            ranks.append(SymbolicTensor.of(self._region(port, layout, rank), Counter({term: 1})))
        return tuple(ranks)

    def _region(self, port: Port, layout: Layout, rank: int) -> tuple[tuple[int, int], ...]:
        return tuple(
            interval(
                self._mesh,
                sharded_atoms(layout, index),
                self._graph.length(dim, self._plan.num_tokens, self._plan.num_rows),
                rank,
            )
            for index, dim in enumerate(port.dims)
        )

    def _buffer(self, module: str, name: str) -> Ranks:
        if name not in self._buffers:
            self._fail(module, f"reads buffer {name!r}, which no step wrote")
        return self._buffers[name]

    def _fail(self, module: str, reason: str) -> NoReturn:
        message = f"section {self._section.name!r}, module {module!r}: {reason}"
        raise VerificationError(message)


def _op(layout: Layout, atoms: tuple[int, ...]) -> str:
    ops = {p.op for p in (layout[a] for a in atoms) if isinstance(p, Partial)}
    return ops.pop() if len(ops) == 1 else "sum"


def _linear(node: Node, inputs: list[Terms]) -> Terms:
    total: Terms = Counter()
    for terms in inputs:
        for term, count in terms.items():
            symbol = f"{node.spec.name}({term.symbol})" if node.spec.kind is ModuleKind.SCALE else term.symbol
            total[Term(symbol, term.site, term.op)] += count
    return total


def _show(terms: Terms) -> str:
    shown = [f"{count} x {term.symbol}{list(term.site) if term.site else ''}" for term, count in sorted(terms.items())]
    return " + ".join(shown[:6] + (["..."] if len(shown) > 6 else [])) or "nothing"
