# SPDX-License-Identifier: Apache-2.0
"""All-reduces that norms take over: the same values on every rank with and without, and exactly where plans are marked."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.placement.placement_cases import CONFIGS, FAMILIES, TABLE, compile_plan, model
from tests.placement.test_runtime import LENGTH_TOKENS, DestructiveNorm, module_of
from tokenspeed_plugin.kernels.comm.reference import add_norm_reference, sum_reference
from tokenspeed_plugin.placement import ModelGraph, PlacementSpec, Residual
from tokenspeed_plugin.placement.cost import CostModel
from tokenspeed_plugin.placement.fusion import mark_fusions
from tokenspeed_plugin.placement.mesh import Mesh
from tokenspeed_plugin.placement.models.runtime_graph import runtime_graph
from tokenspeed_plugin.placement.module_spec import ModuleKind
from tokenspeed_plugin.placement.plan import Compute, FusionKind, ModelPlan
from tokenspeed_plugin.placement.plan_table import PlanTable
from tokenspeed_plugin.placement.runtime import PlannedModel
from tokenspeed_plugin.placement.runtime.residual_sum import RmsNorm
from tokenspeed_plugin.placement.simulation import Batch, Simulation, random_weights
from tokenspeed_plugin.placement.simulation.modules import EPSILON
from tokenspeed_plugin.placement.simulation.weights import Weights

RANKS = 2
FUSED = (FusionKind.ALL_REDUCE_ADD_NORM, FusionKind.ALL_REDUCE_NORM)
SPECS = {
    "qwen3_moe": "attn=tp2,dense=tp2,moe=ep2",
    "deepseek_v2": "attn=tp2,dense=tp2,moe=tp2",
    "deepseek_v3": "attn=tp2,dense=tp2,moe=ep2",
    "gpt_oss": "attn=tp2,dense=tp2,moe=ep2",
}


class Board:
    """What threads in place of ranks show each other."""

    def __init__(self) -> None:
        self.shown: list[Any] = [None] * RANKS
        self.barrier = threading.Barrier(RANKS, timeout=30)
        self.calls: Counter[str] = Counter()

    def exchange(self, rank: int, what: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.shown[rank] = (what, tensor.clone())
        self.barrier.wait()
        assert {shown for shown, _ in self.shown} == {what}, "ranks are in different collectives"
        found = [tensor for _, tensor in self.shown]
        self.barrier.wait()
        self.calls[what] += rank == 0
        return found


class ThreadCommunicator:
    """Collectives over all ranks."""

    def __init__(self, rank: int, board: Board) -> None:
        self.rank, self.board = rank, board

    def all_reduce(self, tensor: torch.Tensor, atoms: tuple[int, ...], op: str) -> torch.Tensor:
        return sum_reference(self.board.exchange(self.rank, "all-reduce", tensor))

    def reduce_scatter(self, tensor: torch.Tensor, atoms: tuple[int, ...], dim: int, op: str) -> torch.Tensor:
        total = sum_reference(self.board.exchange(self.rank, "reduce-scatter", tensor))
        return total.chunk(RANKS, dim)[self.rank].clone()

    def all_gather(self, tensor: torch.Tensor, atoms: tuple[int, ...], dim: int) -> torch.Tensor:
        return torch.cat(self.board.exchange(self.rank, "all-gather", tensor), dim)

    def all_to_all(self, tensor: torch.Tensor, atoms: tuple[int, ...], from_dim: int, dim: int) -> torch.Tensor:
        raise NotImplementedError


class FusingThreadCommunicator(ThreadCommunicator):
    """And the fused step, as the kernel defines it."""

    def all_reduce_add_norm(
        self, branch: torch.Tensor, residual: torch.Tensor | None, norm: RmsNorm, atoms: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        reduced = sum_reference(self.board.exchange(self.rank, "fused", branch))
        return add_norm_reference(reduced, residual, norm.weight, norm.epsilon, norm.weight_offset)


class NumberedNorm(DestructiveNorm):
    """A norm that a kernel can compute; what it adds itself it destroys."""

    def rms_norm(self) -> RmsNorm | None:
        return RmsNorm(self._params["weight"], EPSILON, 1.0 if self._options.get("unit_offset") else 0.0)


class StrangeNorm(DestructiveNorm):
    """A norm of a kind that the kernel does not know."""

    def rms_norm(self) -> RmsNorm | None:
        return None


def modules_of(
    graph: ModelGraph, mesh: Mesh, rank: int, weights: Weights, norm: type[DestructiveNorm]
) -> list[dict[str, Any]]:
    found = []
    for position, name in enumerate(graph.order):
        own = {}
        for spec in (node.spec for node in graph.sections[name].nodes):
            params = {p.name: weights[position, spec.name, p.name] for p in spec.params}
            is_norm = spec.kind is ModuleKind.NORM
            own[spec.name] = (
                norm(graph, mesh, rank, spec, params) if is_norm else module_of(graph, mesh, rank, spec, params)
            )
        found.append(own)
    return found


def run(
    graph: ModelGraph,
    table: PlanTable,
    batch: Batch,
    communicator: type[ThreadCommunicator],
    norm: type[DestructiveNorm] = NumberedNorm,
) -> tuple[list[torch.Tensor], Counter[str]]:
    """What each rank computes, and the collectives that ran."""
    weights, board, mesh = random_weights(graph, 3), Board(), table.plans[0].mesh
    ids = torch.randint(0, 101, (batch.num_tokens,), generator=torch.Generator().manual_seed(5))

    def one(rank: int) -> torch.Tensor:
        torch.set_num_threads(1)
        own = modules_of(graph, mesh, rank, weights, norm)
        return PlannedModel(graph, table, rank, own, communicator(rank, board))(ids, batch.num_tokens)

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS))), board.calls


def planned(family: str, residual: Residual) -> tuple[ModelGraph, PlanTable, Batch]:
    graph = runtime_graph(model(family))
    batch = Batch(2, LENGTH_TOKENS)
    mesh = PlacementSpec.parse(SPECS.get(family, "attn=tp2,dense=tp2")).mesh(RANKS, graph)
    table = PlanTable.build(lambda n: CostModel(graph, mesh, TABLE, n, 2), batch.num_tokens, residual)
    return graph, table, batch


def marked(plan: ModelPlan) -> int:
    return sum(fusion.kind in FUSED for section in plan.sections for fusion in section.fusions)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("residual", [Residual.REPLICATED, Residual.SHARDED])
def test_every_rank_computes_the_same_with_and_without(family: str, residual: Residual) -> None:
    graph, table, batch = planned(family, residual)
    plan = table.plans[table.index(batch.num_tokens)]
    apart, separate = run(graph, table, batch, ThreadCommunicator)
    fused, joint = run(graph, table, batch, FusingThreadCommunicator)
    assert all(torch.equal(a, b) for a, b in zip(apart, fused, strict=True))
    alone = compile_plan(graph, "attn=tp1,dense=tp1,moe=tp1", 1, num_tokens=batch.num_tokens, num_rows=2)
    ids = torch.randint(0, 101, (batch.num_tokens,), generator=torch.Generator().manual_seed(5))
    expected = Simulation(graph, alone, random_weights(graph, 3), batch).run(ids)
    assert all((values - expected).abs().max() < 1e-11 for values in fused)
    assert joint["fused"] == marked(plan)
    assert joint["fused"] + joint["all-reduce"] == separate["all-reduce"]
    assert separate.total() == joint.total() == plan.num_collectives


@pytest.mark.parametrize("family", sorted(set(CONFIGS) - {"gemma3"}))
def test_with_a_replicated_residual_no_all_reduce_is_left_over(family: str) -> None:
    graph, table, batch = planned(family, Residual.REPLICATED)
    _, calls = run(graph, table, batch, FusingThreadCommunicator)
    assert calls == Counter({"fused": 2 * (len(graph.order) - 2) + 1})


def test_only_gemmas_scaled_embedding_is_reduced_by_itself() -> None:
    graph, table, batch = planned("gemma3", Residual.REPLICATED)
    _, calls = run(graph, table, batch, FusingThreadCommunicator)
    assert calls == Counter({"fused": 2 * (len(graph.order) - 2), "all-reduce": 1})


def test_a_norm_that_the_kernel_does_not_know_reduces_nothing() -> None:
    graph, table, batch = planned("qwen3", Residual.REPLICATED)
    plain, _ = run(graph, table, batch, ThreadCommunicator)
    strange, calls = run(graph, table, batch, FusingThreadCommunicator, StrangeNorm)
    assert all(torch.equal(a, b) for a, b in zip(plain, strange, strict=True))
    assert calls == Counter({"all-reduce": 2 * (len(graph.order) - 2) + 1})


def test_a_plan_without_an_all_reduce_is_left_as_it_is() -> None:
    graph, table, batch = planned("qwen3", Residual.SHARDED)
    _, separate = run(graph, table, batch, ThreadCommunicator)
    _, joint = run(graph, table, batch, FusingThreadCommunicator)
    assert separate == joint
    assert "fused" not in joint


def test_the_first_reader_decides_what_is_marked() -> None:
    plan = planned("qwen3", Residual.REPLICATED)[1].plans[0]
    first, second = plan.sections[1], plan.sections[2]
    # Layer 0 reduces the embedding: its norm reads it first, and the residual sum later.
    assert [f.kind for f in first.fusions] == [FusionKind.ALL_REDUCE_NORM, *[FusionKind.ALL_REDUCE_ADD_NORM] * 2]
    assert [f.kind for f in second.fusions] == [FusionKind.ALL_REDUCE_ADD_NORM] * 2
    assert [f.crosses for f in first.fusions] == [False, False, True]


@pytest.mark.parametrize(("also_read", "fused"), [(None, 1), ("self_attn@R", 0), ("self_attn@P", 0)])
def test_what_something_else_reads_stays_where_it_is(also_read: str | None, fused: int) -> None:
    graph, table, _ = planned("qwen3", Residual.REPLICATED)
    section = table.plans[0].sections[2]
    mlp = next(step for step in section.steps if isinstance(step, Compute) and step.module == "mlp")
    extra = () if also_read is None else (replace(mlp, reads=(also_read,), target="again"),)
    steps = (*section.steps[:-1], *extra, section.steps[-1])
    (marked_section,) = mark_fusions(graph, [replace(section, steps=steps)])
    assert len(marked_section.fusions) == fused
