# SPDX-License-Identifier: Apache-2.0
"""Linear layers that leave their product to the reduction behind them: same values, and only where that is possible."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.placement.placement_cases import CONFIGS, FAMILIES
from tests.placement.test_fused_reduction import (
    Board,
    FusingThreadCommunicator,
    NumberedNorm,
    StrangeNorm,
    ThreadCommunicator,
    modules_of,
    planned,
    run,
)
from tests.placement.test_runtime import DestructiveNorm, SimulatedModule
from tokenspeed_plugin.kernels.comm.linear_operation import Linear, linear_all_reduce_add_norm
from tokenspeed_plugin.kernels.comm.operation import ReductionGroup, register_group, remove_group
from tokenspeed_plugin.kernels.comm.overlap import Overlap, Terms
from tokenspeed_plugin.placement import ModelGraph, PlacementError, Residual
from tokenspeed_plugin.placement.mesh import Mesh
from tokenspeed_plugin.placement.module_spec import ModuleKind
from tokenspeed_plugin.placement.plan_table import PlanTable
from tokenspeed_plugin.placement.runtime import PlannedModel
from tokenspeed_plugin.placement.runtime.residual_sum import RmsNorm
from tokenspeed_plugin.placement.simulation import Batch, random_weights
from tokenspeed_plugin.placement.spec import Overlapping, split_options

LAST = {ModuleKind.ATTENTION: "o_proj", ModuleKind.MLA: "o_proj", ModuleKind.MLP: "down_proj"}
RANKS = 2


class BoardExchange:
    """Terms by threads in place of ranks; with ``apart`` the two terms are handed out as they are."""

    way, max_rows = "threads", None

    def __init__(self, rank: int, board: Board, *, apart: bool) -> None:
        self.rank, self.board, self.apart = rank, board, apart

    def begin(self, product: torch.Tensor) -> Any:
        return BoardTransfer(self, product)


class BoardTransfer:
    def __init__(self, exchange: BoardExchange, product: torch.Tensor) -> None:
        self.exchange, self.product = exchange, product
        self.begun: dict[int, tuple[int, int]] = {}

    def start(self, part: int, first: int, end: int) -> None:
        self.begun[part] = (first, end)

    def wait(self, part: int, first: int, end: int) -> Terms:
        assert self.begun.pop(part) == (first, end)
        board, rank = self.exchange.board, self.exchange.rank
        terms = board.exchange(rank, "first part" if part == 0 else "later part", self.product[first:end])
        return Terms(terms[rank], terms[1 - rank]) if self.exchange.apart else Terms(terms[0] + terms[1])


class OverlappingThreadCommunicator(FusingThreadCommunicator):
    """And the linear layer, through the operation that torch sees."""

    apart, part_rows = False, 1

    def __init__(self, rank: int, board: Board) -> None:
        super().__init__(rank, board)
        overlap = Overlap(BoardExchange(rank, board, apart=self.apart), self.part_rows)
        register_group(f"rank {rank}", ReductionGroup(lambda t: self.all_reduce(t, (), "sum"), None, overlap))

    def linear_all_reduce_add_norm(
        self, rows: torch.Tensor, linear: Linear, residual: torch.Tensor | None, norm: RmsNorm, atoms: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.board.calls["linear"] += self.rank == 0
        return linear_all_reduce_add_norm(
            rows, linear, residual, norm.weight, norm.epsilon, norm.weight_offset, f"rank {self.rank}"
        )


class ApartCommunicator(OverlappingThreadCommunicator):
    apart = True


class WholeStepsCommunicator(OverlappingThreadCommunicator):
    """Steps of these tests are too small to be cut."""

    part_rows = 1024


class OpenSimulatedModule:
    """A simulated attention or MLP that can leave its last layer out: with the identity in its place."""

    def __init__(self, whole: SimulatedModule, last: str) -> None:
        self.whole = whole
        weight = whole._params[f"{last}.weight"]
        flat = weight.flatten(1)
        self._linear = Linear(flat, whole._params.get(f"{last}.bias"))
        self.open = SimulatedModule.__new__(SimulatedModule)
        self.open.__dict__.update(whole.__dict__)
        inner = torch.eye(flat.shape[1], dtype=weight.dtype).reshape(flat.shape[1], *weight.shape[1:])
        kept = {name: value for name, value in whole._params.items() if name != f"{last}.bias"}
        self.open._params = {**kept, f"{last}.weight": inner}

    def linear(self) -> Linear | None:
        return self._linear

    def __call__(self, *inputs: torch.Tensor, signature: Any, step: Any) -> torch.Tensor:
        return self.whole(*inputs, signature=signature, step=step)

    def without_linear(self, *inputs: torch.Tensor, signature: Any, step: Any) -> torch.Tensor:
        return self.open(*inputs, signature=signature, step=step)


def opened(graph: ModelGraph, modules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for name, own in zip(graph.order, modules, strict=True):
        for spec in (node.spec for node in graph.sections[name].nodes):
            if spec.kind in LAST:
                own[spec.name] = OpenSimulatedModule(own[spec.name], LAST[spec.kind])
    return modules


def overlapped(
    graph: ModelGraph,
    table: PlanTable,
    batch: Batch,
    communicator: type[ThreadCommunicator],
    norm: type[DestructiveNorm] = NumberedNorm,
    overlap_tokens: int = 1,
) -> tuple[list[torch.Tensor], Counter[str]]:
    """As ``run``, with modules that can leave their last layers out."""
    weights, board = random_weights(graph, 3), Board()
    mesh: Mesh = table.plans[0].mesh
    ids = torch.randint(0, 101, (batch.num_tokens,), generator=torch.Generator().manual_seed(5))

    def one(rank: int) -> torch.Tensor:
        torch.set_num_threads(1)
        own = opened(graph, modules_of(graph, mesh, rank, weights, norm))
        planned_model = PlannedModel(graph, table, rank, own, communicator(rank, board), overlap_tokens)
        return planned_model(ids, batch.num_tokens)

    try:
        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(one, range(RANKS))), board.calls
    finally:
        for rank in range(RANKS):
            remove_group(f"rank {rank}")


def linears(graph: ModelGraph) -> int:
    return sum(node.spec.kind in LAST for name in graph.order for node in graph.sections[name].nodes)


@pytest.mark.parametrize("communicator", [OverlappingThreadCommunicator, ApartCommunicator, WholeStepsCommunicator])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_computes_the_same_whatever_is_overlapped(
    family: str, communicator: type[OverlappingThreadCommunicator]
) -> None:
    graph, table, batch = planned(family, Residual.REPLICATED)
    apart, separate = run(graph, table, batch, ThreadCommunicator)
    together, joint = overlapped(graph, table, batch, communicator)
    assert all((a - b).abs().max() < 1e-11 for a, b in zip(apart, together, strict=True))
    assert torch.equal(*together)
    # Shared experts end in a layer of their own, whose sum with the routed ones is what is reduced.
    shared = sum(node.spec.name == "shared_experts" for name in graph.order for node in graph.sections[name].nodes)
    assert joint["linear"] == linears(graph) - shared > 0
    rest = joint["fused"] + joint["all-reduce"]
    if communicator is WholeStepsCommunicator:
        assert rest == separate["all-reduce"]
        assert not joint["first part"]
    else:
        assert rest + joint["first part"] == separate["all-reduce"]
        assert joint["first part"] == joint["linear"]
        assert joint["later part"] == 3 * joint["linear"]


def test_plans_for_small_steps_leave_linear_layers_as_they_are() -> None:
    graph, table, batch = planned("qwen3", Residual.REPLICATED)
    fused, separate = run(graph, table, batch, FusingThreadCommunicator)
    for overlap_tokens, taken in ((batch.num_tokens + 1, 0), (batch.num_tokens, linears(graph))):
        found, calls = overlapped(
            graph, table.split(overlap_tokens), batch, OverlappingThreadCommunicator, overlap_tokens=overlap_tokens
        )
        assert calls["linear"] == taken
        assert taken or calls["fused"] == separate["fused"]
        assert all((a - b).abs().max() < 1e-11 for a, b in zip(fused, found, strict=True))


def test_a_table_that_is_split_serves_every_size_with_the_same_plan() -> None:
    _, table, _ = planned("qwen3", Residual.AUTO)
    most = table.limits_tokens[-1]
    for border in range(1, most + 3):
        split = table.split(border)
        assert [split.plans[split.index(n)] for n in range(1, most + 1)] == [
            table.plans[table.index(n)] for n in range(1, most + 1)
        ]
        inside = 1 < border <= most
        assert (split.index(border) != split.index(border - 1)) if inside else split is table


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_split_residual_has_nothing_to_overlap(family: str) -> None:
    graph, table, batch = planned(family, Residual.SHARDED)
    apart, separate = run(graph, table, batch, FusingThreadCommunicator)
    together, joint = overlapped(graph, table, batch, OverlappingThreadCommunicator)
    assert separate.total() == joint.total() - joint["linear"] - joint["later part"]
    assert all((a - b).abs().max() < 1e-11 for a, b in zip(apart, together, strict=True))


def test_a_norm_that_the_kernel_does_not_know_takes_no_linear_layer() -> None:
    graph, table, batch = planned("qwen3", Residual.REPLICATED)
    plain, _ = run(graph, table, batch, ThreadCommunicator)
    strange, calls = overlapped(graph, table, batch, OverlappingThreadCommunicator, StrangeNorm)
    assert all(torch.equal(a, b) for a, b in zip(plain, strange, strict=True))
    assert calls == Counter({"all-reduce": 2 * (len(graph.order) - 2) + 1})


def test_overlap_wants_all_reduces_and_the_fused_kernel() -> None:
    assert split_options("auto").overlapping is Overlapping.AUTO
    assert split_options("auto,residual=sharded,fusion=off").residual is Residual.SHARDED
    options = split_options("attn=tp2,dense=tp2,overlap=on")
    assert (options.spec, options.residual, options.overlapping) == (
        "attn=tp2,dense=tp2",
        Residual.REPLICATED,
        Overlapping.ON,
    )
    assert split_options("auto,overlap=off").residual is Residual.AUTO
    for text, message in (
        ("auto,overlap=yes", "overlap=yes is not one of auto, off, on, reference"),
        ("auto,overlap=on,residual=sharded", "overlap=on goes with residual=replicated"),
        ("auto,overlap=reference,fusion=off", "overlap=reference goes with fusion=auto"),
    ):
        with pytest.raises(PlacementError, match=message):
            split_options(text)
