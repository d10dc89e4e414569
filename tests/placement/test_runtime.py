# SPDX-License-Identifier: Apache-2.0
"""Plans on four real processes with real process groups, token padding included, against a single rank."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed, multiprocessing
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.placement.placement_cases import TABLE, compile_plan, model
from tests.placement.random_models import SIZES, wide_modules
from tokenspeed_plugin.placement import ModelGraph, Node, PlacementError, PlacementSpec, Residual, Section
from tokenspeed_plugin.placement.cost import CostModel
from tokenspeed_plugin.placement.graph import STREAM
from tokenspeed_plugin.placement.mesh import Mesh
from tokenspeed_plugin.placement.models import blocks
from tokenspeed_plugin.placement.models.decoder import HIDDEN_PORT, entry, leave
from tokenspeed_plugin.placement.module_spec import ModuleKind, ModuleSpec, Signature
from tokenspeed_plugin.placement.plan_table import PlanTable
from tokenspeed_plugin.placement.runtime import Module, PlannedModel, TorchCommunicator
from tokenspeed_plugin.placement.runtime.residual_sum import ResidualAdd
from tokenspeed_plugin.placement.runtime.vllm_communicator import GroupCommunicator
from tokenspeed_plugin.placement.simulation import Batch, Simulation, random_weights
from tokenspeed_plugin.placement.simulation.modules import COMPUTE, Local
from tokenspeed_plugin.placement.simulation.weights import Weights, local_weight, offsets

WORLD_SIZE = 4
LENGTH_TOKENS = 5
CASES = tuple(
    (family, spec, residual.value)
    for family, spec in (
        ("llama", "attn=tp4,dense=tp4,moe=tp1"),
        ("qwen3_moe", "attn=tp4,dense=tp4,moe=ep4"),
        ("deepseek_v3", "attn=tp2,dense=tp2,moe=ep4"),
        ("gpt_oss", "attn=tp4,dense=tp4,moe=tp2ep2"),
        ("gemma3", "attn=tp2,dense=tp4,moe=tp1"),
        ("wide", "attn=tp4,dense=tp4,moe=tp1"),
    )
    for residual in (Residual.REPLICATED, Residual.SHARDED)
)


def graph_of(family: str) -> ModelGraph:
    """A tiny model whose logits divide over four ranks; ``wide`` has an all-to-all in it."""
    if family != "wide":
        return model(family, vocab_size=104)
    columns, norm, rows = wide_modules("wide")
    nodes = (
        Node(blocks.norm("first"), (STREAM,)),
        Node(columns, ("first",)),
        Node(norm, (columns.name,)),
        Node(rows, (norm.name,)),
        Node(blocks.add("residual"), (STREAM, rows.name)),
    )
    layer = Section("layer", nodes, HIDDEN_PORT, "residual")
    sections = {s.name: s for s in (entry(), layer, leave())}
    return ModelGraph("wide", sections, ("entry", "layer", "layer", "exit"), {**SIZES, "wide": 16, "vocab": 104})


def plan_table(graph: ModelGraph, spec: str, residual: str, num_rows: int) -> tuple[Mesh, PlanTable]:
    mesh = PlacementSpec.parse(spec).mesh(WORLD_SIZE, graph)
    return mesh, PlanTable.build(lambda n: CostModel(graph, mesh, TABLE, n, num_rows), 64, Residual(residual))


class SimulatedModule:
    """A module of the simulation with this rank's part of the weights."""

    def __init__(
        self, graph: ModelGraph, mesh: Mesh, rank: int, spec: ModuleSpec, weights: dict[str, torch.Tensor]
    ) -> None:
        self._compute = COMPUTE[spec.kind]
        self._options = spec.options
        self._params = {p.name: local_weight(graph, mesh, p, weights[p.name], rank) for p in spec.params}
        self._first = offsets(graph, mesh, spec, rank)

    def __call__(self, *inputs: torch.Tensor, signature: Signature, step: object) -> torch.Tensor:
        batch = Batch(0, LENGTH_TOKENS)
        rows = (0, NUM_ROWS_PER_RANK)
        local = Local(self._options, self._params, self._first, (0, len(inputs[0])), rows, batch)
        return self._compute(local, *inputs)


class DestructiveNorm(SimulatedModule):
    """A norm that leaves nothing of the two operands of the sum that it takes with it."""

    num_sums = 0

    def add_norm(self, residual: torch.Tensor, branch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        DestructiveNorm.num_sums += 1
        total = residual + branch
        normalised = self(total, signature=Signature((), ()), step=None)
        residual.fill_(float("nan"))
        branch.fill_(float("nan"))
        return normalised, total


NUM_ROWS_PER_RANK = 2


def module_of(graph: ModelGraph, mesh: Mesh, rank: int, spec: ModuleSpec, weights: dict[str, torch.Tensor]) -> Module:
    if spec.kind is ModuleKind.ADD:
        return ResidualAdd()
    kind = DestructiveNorm if spec.kind is ModuleKind.NORM else SimulatedModule
    return kind(graph, mesh, rank, spec, weights)


def modules_of(graph: ModelGraph, mesh: Mesh, rank: int, weights: Weights) -> list[dict[str, Module]]:
    return [
        {
            node.spec.name: module_of(
                graph,
                mesh,
                rank,
                node.spec,
                {p.name: weights[position, node.spec.name, p.name] for p in node.spec.params},
            )
            for node in graph.sections[name].nodes
        }
        for position, name in enumerate(graph.order)
    ]


def difference(case: tuple[str, str, str], rank: int) -> dict[str, float]:
    """Largest difference to a single rank, and how much padding there was."""
    family, spec, residual = case
    graph = graph_of(family)
    replicas = WORLD_SIZE // PlacementSpec.parse(spec).attn_tp
    batch = Batch(NUM_ROWS_PER_RANK * replicas, LENGTH_TOKENS)
    mesh, table = plan_table(graph, spec, residual, batch.num_sequences)
    weights = random_weights(graph, 3)
    ids = torch.randint(0, 104, (batch.num_tokens,), generator=torch.Generator().manual_seed(5))
    alone = compile_plan(
        graph, "attn=tp1,dense=tp1,moe=tp1", 1, num_tokens=batch.num_tokens, num_rows=batch.num_sequences
    )
    expected = Simulation(graph, alone, weights, batch).run(ids)
    planned = PlannedModel(
        graph, table, rank, modules_of(graph, mesh, rank, weights), TorchCommunicator(mesh, table.plans)
    )
    replica = mesh.index(rank, mesh.atoms("dp"))
    ours = planned(ids.chunk(replicas)[replica], batch.num_tokens)
    error = (ours - expected.chunk(replicas)[replica]).abs().max().item()
    return {"error": error, "padding": planned.padded_tokens(batch.num_tokens) - batch.num_tokens}


def difference_of_reduce_scatter(rank: int) -> float:
    """Of the operation that graphs see, beside what its shape function says."""
    group = SimpleNamespace(world_size=WORLD_SIZE, unique_name="world", device_group=distributed.group.WORLD)
    communicator = GroupCommunicator(group, ())
    communicator.leave_vllms_reduce_scatter()
    columns = torch.arange(3 * 2 * WORLD_SIZE, dtype=torch.float32).reshape(3, -1)
    part = communicator.reduce_scatter(columns * (rank + 1), (), 1, "sum")
    with FakeTensorMode() as mode:
        shape = communicator.reduce_scatter(mode.from_tensor(columns), (), 1, "sum")
    assert (shape.shape, shape.stride()) == (part.shape, part.stride())
    total = columns * sum(range(1, WORLD_SIZE + 1))
    return (part - total[:, 2 * rank :][:, :2]).abs().max().item()


def run_cases(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD_SIZE)
    found = {" ".join(case): difference(case, rank) for case in CASES}
    found["reduce-scatter"] = {"error": difference_of_reduce_scatter(rank)}
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    """What each of four processes found for every case."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(run_cases, (str(folder),), nprocs=WORLD_SIZE)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_every_rank_computes_what_one_rank_computes(
    case: tuple[str, str, str], outcomes: list[dict[str, dict[str, float]]]
) -> None:
    assert max(found[" ".join(case)]["error"] for found in outcomes) < 1e-11


def test_torchs_reduce_scatter_adds_what_all_ranks_have(outcomes: list[dict[str, dict[str, float]]]) -> None:
    assert [found["reduce-scatter"]["error"] for found in outcomes] == [0.0] * WORLD_SIZE


def test_steps_that_do_not_divide_were_padded(outcomes: list[dict[str, dict[str, float]]]) -> None:
    padded = {case for case, found in outcomes[0].items() if found.get("padding")}
    assert {f"{family} {spec} sharded" for family, spec, _ in CASES if spec.startswith("attn=tp4")} <= padded
    assert not any(case.endswith("replicated") for case in padded if "wide" not in case)


def test_a_collective_over_uneven_parts_is_refused_by_number() -> None:
    graph = model("llama")
    mesh, table = plan_table(graph, "attn=tp4,dense=tp4", "replicated", 2)
    with pytest.raises(PlacementError, match="all-gather of 'lm_head': 101 vocab do not divide evenly into 4 parts"):
        PlannedModel(graph, table, 0, [], TorchCommunicator(mesh, ()))


def test_more_tokens_than_a_rank_has_are_refused_not_cut_off() -> None:
    graph = graph_of("llama")
    mesh, table = plan_table(graph, "attn=tp2,dense=tp2", "replicated", 2)
    modules = modules_of(graph, mesh, 0, random_weights(graph, 3))
    planned = PlannedModel(graph, table, 0, modules, TorchCommunicator(mesh, ()))
    with pytest.raises(
        PlacementError, match="7 token ids on one data-parallel rank: a step of 10 tokens has 5 on each"
    ):
        planned(torch.zeros(7, dtype=torch.long), 10)


def test_plans_cover_every_step_size_once() -> None:
    graph = model("llama", hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8)
    mesh = PlacementSpec.parse("attn=tp8,dense=tp8").mesh(8, graph)
    table = PlanTable.build(lambda n: CostModel(graph, mesh, TABLE, n, 1), 10000)
    assert table.limits_tokens[-1] == 10000
    assert len(table.plans) == 2
    limit = table.limits_tokens[0]
    assert [table.index(n) for n in (1, limit, limit + 1, 10000)] == [0, 0, 1, 1]
    assert [p.token_multiple for p in table.plans] == [1, 8]
    for wrong in (0, 10001):
        with pytest.raises(PlacementError, match=f"a step of {wrong} tokens: plans exist for 1 to 10000"):
            table.index(wrong)
