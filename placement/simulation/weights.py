# SPDX-License-Identifier: Apache-2.0
"""Full weights for the simulation, and the part of them that a rank keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from tokenspeed_plugin.placement.algebra import Partial, Shard
from tokenspeed_plugin.placement.layout import Interval, interval, spread

if TYPE_CHECKING:
    from tokenspeed_plugin.placement.graph import ModelGraph
    from tokenspeed_plugin.placement.mesh import Mesh
    from tokenspeed_plugin.placement.module_spec import ModuleSpec, Param

Weights: TypeAlias = dict[tuple[int, str, str], torch.Tensor]
"""Full tensors by position of the section in the model, module and parameter."""


def random_weights(graph: ModelGraph, seed: int, dtype: torch.dtype = torch.float64) -> Weights:
    """Weights in the range of trained ones: matrices scaled by their input length, vectors around one."""
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for position, name in enumerate(graph.order):
        for node in graph.sections[name].nodes:
            for param in node.spec.params:
                shape = [graph.sizes[dim] for dim in param.dims]
                values = torch.randn(shape, generator=generator, dtype=dtype)
                is_vector = len(shape) == 1 and not param.additive
                scaled = 1 + 0.2 * values if is_vector else values * 1.5 / shape[-1] ** 0.5
                weights[position, node.spec.name, param.name] = scaled
    return weights


def held_interval(graph: ModelGraph, mesh: Mesh, param: Param, index: int, rank: int) -> Interval:
    """Which part of dimension ``index`` of ``param`` a rank holds."""
    atoms = tuple(a for a, p in enumerate(spread(mesh, param.placements)) if p == Shard(index))
    dim = param.dims[index]
    if dim not in param.follows:
        return interval(mesh, atoms, graph.sizes[dim], rank)
    leader, ratio = param.follows[dim]
    low, high = interval(mesh, atoms, graph.sizes[leader], rank)
    return low // ratio, -(-high // ratio)


def local_weight(graph: ModelGraph, mesh: Mesh, param: Param, full: torch.Tensor, rank: int) -> torch.Tensor:
    """The part of ``full`` on ``rank``; zeros where another rank adds a Partial parameter."""
    for index in range(len(param.dims)):
        low, high = held_interval(graph, mesh, param, index, rank)
        full = full.narrow(index, low, high - low)
    partial = [a for a, p in enumerate(spread(mesh, param.placements)) if isinstance(p, Partial)]
    return full if all(mesh.coordinates(rank)[a] == 0 for a in partial) else torch.zeros_like(full)


def offsets(graph: ModelGraph, mesh: Mesh, spec: ModuleSpec, rank: int) -> dict[str, int]:
    """First index that ``rank`` holds of every dimension of the module's parameters."""
    return {
        dim: held_interval(graph, mesh, param, index, rank)[0]
        for param in spec.params
        for index, dim in enumerate(param.dims)
    }
