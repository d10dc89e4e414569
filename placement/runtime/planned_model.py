# SPDX-License-Identifier: Apache-2.0
"""A whole model on one rank: picks the plan for the size of the step, pads the tokens, runs the sections in order."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from tokenspeed_plugin.placement.algebra import PlacementError
from tokenspeed_plugin.placement.layout import sharded_atoms
from tokenspeed_plugin.placement.runtime.communicator import FusingCommunicator, OverlappingCommunicator
from tokenspeed_plugin.placement.runtime.compiled_layer import CompiledDecoderLayer, Module
from tokenspeed_plugin.placement.runtime.residual_sum import OpenSum, fused_reductions, leaves_open, takes_open

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tokenspeed_plugin.placement.graph import ModelGraph
    from tokenspeed_plugin.placement.plan import ModelPlan, Move
    from tokenspeed_plugin.placement.plan_table import PlanTable
    from tokenspeed_plugin.placement.runtime.communicator import Communicator


class PlannedModel:
    """The sections of every plan of a table, bound to this rank's modules.

    ``modules[i]`` holds the modules of the ``i``-th section of the model by name; all plans share them.
    """

    def __init__(
        self,
        graph: ModelGraph,
        table: PlanTable,
        rank: int,
        modules: Sequence[Mapping[str, Module]],
        communicator: Communicator,
        overlap_tokens: int = 1,
    ) -> None:
        """Bind the plans; those for steps of fewer than ``overlap_tokens`` leave linear layers as they are.

        Raises:
            PlacementError: a collective would move parts of different sizes; names the value and the lengths.
        """
        self._table = table
        self._layers: list[list[CompiledDecoderLayer]] = []
        for limit, plan in zip(table.limits_tokens, table.plans, strict=True):
            _check_even(graph, plan)
            overlaps = isinstance(communicator, OverlappingCommunicator) and limit >= overlap_tokens
            self._layers.append(_layers(plan, rank, modules, communicator, overlaps))

    def padded_tokens(self, num_tokens: int) -> int:
        """Tokens of a step with padding, over all data-parallel ranks."""
        multiple = self._table.plans[self._table.index(num_tokens)].token_multiple
        return -(-num_tokens // multiple) * multiple

    def run(self, index: int, stream: torch.Tensor, step: Any) -> torch.Tensor:
        """Result of the last section under plan ``index``; ``stream`` is padded, ``step`` goes to every module."""
        values: tuple[torch.Tensor, ...] = (stream,)
        for layer in self._layers[index]:
            values = layer(values, step)
        return values[0]

    def __call__(self, ids: torch.Tensor, num_tokens: int, step: Any = None) -> torch.Tensor:
        """Result of the last section for this rank's ``ids``, of a step of ``num_tokens`` over all data-parallel ranks.

        ``ids`` are padded with zeros behind; whoever selects rows of the result must not select padding.

        Raises:
            PlacementError: more ids than this rank's share of the step.
        """
        index = self._table.index(num_tokens)
        mesh = self._table.plans[index].mesh
        own = self.padded_tokens(num_tokens) // mesh.size(mesh.atoms("dp"))
        if len(ids) > own:
            message = f"{len(ids)} token ids on one data-parallel rank: a step of {num_tokens} tokens has {own} on each"
            raise PlacementError(message)
        return self.run(index, torch.nn.functional.pad(ids, (0, own - len(ids))), step)


def _layers(
    plan: ModelPlan, rank: int, modules: Sequence[Mapping[str, Module]], communicator: Communicator, overlaps: bool
) -> list[CompiledDecoderLayer]:
    """The sections; between two of them a residual sum stays open when the second one begins with its norm."""
    sections = list(zip(plan.sections, modules, strict=True))
    opened = [leaves_open(*before) and takes_open(*behind) for before, behind in pairwise(sections)]
    fuses = isinstance(communicator, FusingCommunicator)
    layers = []
    takes: OpenSum | None = None
    for index, (section, own) in enumerate(sections):
        behind = sections[index + 1] if index < len(opened) and opened[index] else None
        opening = getattr(behind[0].steps[0], "module", None) if behind else None
        reductions, crossing = (
            fused_reductions(section, own, behind and behind[1], opening, overlaps=overlaps)
            if fuses
            else ({}, OpenSum())
        )
        leaves = crossing if behind else None
        layers.append(
            CompiledDecoderLayer(
                plan.mesh,
                rank,
                section,
                own,
                communicator,
                takes=takes,
                leaves=leaves,
                reductions=reductions,
                overlaps=overlaps,
            )
        )
        takes = leaves
    return layers


def _check_even(graph: ModelGraph, plan: ModelPlan) -> None:
    for section in plan.sections:
        for move in section.moves:
            for dim in {move.dim, move.from_dim} - {None}:
                _check_move(graph, plan, section.section, move, dim or 0)


def _check_move(graph: ModelGraph, plan: ModelPlan, section: str, move: Move, dim: int) -> None:
    name = graph.sections[section].port(move.value).dims[dim]
    if name == "tokens":
        return
    length = graph.length(name, plan.num_tokens, plan.num_rows)
    parts = max(plan.mesh.size(sharded_atoms(layout, dim)) for layout in (move.before, move.after))
    if length % parts:
        message = f"{move.kind.value} of {move.value!r}: {length} {name} do not divide evenly into {parts} parts"
        raise PlacementError(message)
