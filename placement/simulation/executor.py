# SPDX-License-Identifier: Apache-2.0
"""Executes a plan: every rank's buffers side by side, collectives as operations on the list of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from tokenspeed_plugin.placement.algebra import TOKENS, Conversion
from tokenspeed_plugin.placement.layout import Interval, Layout, interval, sharded_atoms, spread
from tokenspeed_plugin.placement.plan import Compute, ModelPlan, Move, SectionPlan
from tokenspeed_plugin.placement.simulation.modules import COMPUTE, Local
from tokenspeed_plugin.placement.simulation.weights import Weights, local_weight, offsets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenspeed_plugin.placement.graph import ModelGraph
    from tokenspeed_plugin.placement.module_spec import ModuleSpec
    from tokenspeed_plugin.placement.simulation.batch import Batch

Ranks: TypeAlias = list[torch.Tensor]


class Simulation:
    """One plan with full weights; each rank sees only its part of them."""

    def __init__(self, graph: ModelGraph, plan: ModelPlan, weights: Weights, batch: Batch) -> None:
        self._graph = graph
        self._plan = plan
        self._mesh = plan.mesh
        self._weights = weights
        self._batch = batch
        self._ranks = range(plan.mesh.world_size)

    def run(self, ids: torch.Tensor) -> torch.Tensor:
        """Whole result of the last section for token ids ``[tokens]`` (for shipped models the logits ``[rows, vocab]``)."""
        start = spread(self._mesh, {"dp": TOKENS})
        stream = [ids[slice(*self._held("tokens", sharded_atoms(start, 0), rank))] for rank in self._ranks]
        for position, section in enumerate(self._plan.sections):
            stream = self._section(position, section, stream)
        last = self._plan.sections[-1]
        graph_section = self._graph.sections[last.section]
        return self._assemble(graph_section.port(graph_section.result).dims, last.exit, stream)

    def _section(self, position: int, section: SectionPlan, stream: Ranks) -> Ranks:
        buffers = {section.entry_buffer: stream}
        for step in section.steps:
            if isinstance(step, Move):
                buffers[step.target] = self._move(section, step, buffers[step.source])
            else:
                buffers[step.target] = self._compute(position, section, step, [buffers[read] for read in step.reads])
        return buffers[section.exit_buffer]

    def _compute(self, position: int, section: SectionPlan, step: Compute, inputs: list[Ranks]) -> Ranks:
        spec = self._graph.sections[section.section].node(step.module).spec
        function = COMPUTE[spec.kind]
        return [
            function(self._local(position, spec, step, rank), *(ranks[rank] for ranks in inputs))
            for rank in self._ranks
        ]

    def _local(self, position: int, spec: ModuleSpec, step: Compute, rank: int) -> Local:
        params = {
            p.name: local_weight(self._graph, self._mesh, p, self._weights[position, spec.name, p.name], rank)
            for p in spec.params
        }
        tokens = self._held("tokens", sharded_atoms(step.signature.inputs[0], 0), rank)
        rows = self._held("rows", sharded_atoms(step.signature.output, 0), rank)
        return Local(spec.options, params, offsets(self._graph, self._mesh, spec, rank), tokens, rows, self._batch)

    def _held(self, dim: str, atoms: Sequence[int], rank: int) -> Interval:
        return interval(self._mesh, atoms, self._length(dim), rank)

    def _length(self, dim: str) -> int:
        return self._graph.length(dim, self._batch.num_tokens, self._batch.num_sequences)

    def _move(self, section: SectionPlan, move: Move, source: Ranks) -> Ranks:
        dims = self._graph.sections[section.section].port(move.value).dims
        result = list(source)
        for group in self._mesh.groups(move.atoms):
            members = [source[rank] for rank in group]
            for rank, tensor in zip(group, self._exchange(move, dims, members, group), strict=True):
                result[rank] = tensor
        return result

    def _exchange(self, move: Move, dims: tuple[str, ...], members: Ranks, group: Sequence[int]) -> Ranks:
        kind = move.kind
        if kind is Conversion.KEEP_FIRST:
            neutral = 0.0 if move.op == "sum" else float("-inf")
            return [members[0], *(torch.full_like(t, neutral) for t in members[1:])]
        if kind is Conversion.SLICE:
            return [self._cut(move, dims, t, rank) for t, rank in zip(members, group, strict=True)]
        if kind in (Conversion.ALL_GATHER, Conversion.ALL_TO_ALL):
            joined_dim = move.dim if kind is Conversion.ALL_GATHER else move.from_dim
            whole = torch.cat(members, dim=joined_dim or 0)
            return [whole if kind is Conversion.ALL_GATHER else self._cut(move, dims, whole, rank) for rank in group]
        stacked = torch.stack(members)
        total = stacked.sum(0) if move.op == "sum" else stacked.amax(0)
        return [total if kind is Conversion.ALL_REDUCE else self._cut(move, dims, total, rank) for rank in group]

    def _cut(self, move: Move, dims: tuple[str, ...], whole: torch.Tensor, rank: int) -> torch.Tensor:
        """The part that ``rank`` keeps of a tensor that was whole along ``move.dim`` inside the group."""
        dim = move.dim or 0
        before = self._held(dims[dim], sharded_atoms(move.before, dim), rank)[0]
        low, high = self._held(dims[dim], sharded_atoms(move.after, dim), rank)
        return whole.narrow(dim, low - before, high - low)

    def _assemble(self, dims: tuple[str, ...], layout: Layout, ranks: Ranks) -> torch.Tensor:
        """One tensor from the parts of all ranks; ranks that hold the same part must agree exactly."""
        whole = torch.full([self._length(dim) for dim in dims], float("nan"), dtype=ranks[0].dtype)
        for rank in self._ranks:
            held = [self._held(dim, sharded_atoms(layout, i), rank) for i, dim in enumerate(dims)]
            whole[tuple(slice(*part) for part in held)] = ranks[rank]
        return whole
