# SPDX-License-Identifier: Apache-2.0
"""Residual sums that norms take over: the same values, though such a norm destroys what it reads."""

from __future__ import annotations

import pytest
import torch

from tests.placement.placement_cases import FAMILIES, TABLE, compile_plan, model
from tests.placement.test_runtime import LENGTH_TOKENS, NUM_ROWS_PER_RANK, DestructiveNorm, modules_of
from tokenspeed_plugin.placement import Residual
from tokenspeed_plugin.placement.cost import CostModel
from tokenspeed_plugin.placement.models.runtime_graph import runtime_graph
from tokenspeed_plugin.placement.plan_table import PlanTable
from tokenspeed_plugin.placement.runtime import PlannedModel, TorchCommunicator
from tokenspeed_plugin.placement.runtime.residual_sum import ResidualAdd, leaves_open, sums_before_norms, takes_open
from tokenspeed_plugin.placement.simulation import Batch, Simulation, random_weights


@pytest.mark.parametrize("family", FAMILIES)
def test_a_norm_that_destroys_its_operands_changes_nothing(family: str) -> None:
    graph = model(family)
    batch = Batch(NUM_ROWS_PER_RANK, LENGTH_TOKENS)
    ids = torch.randint(0, 101, (batch.num_tokens,), generator=torch.Generator().manual_seed(5))
    plan = compile_plan(graph, "attn=tp1,dense=tp1,moe=tp1", 1, num_tokens=batch.num_tokens, num_rows=2)
    expected = Simulation(graph, plan, random_weights(graph, 3), batch).run(ids)
    table = PlanTable.build(
        lambda n: CostModel(graph, plan.mesh, TABLE, n, NUM_ROWS_PER_RANK), batch.num_tokens, Residual.AUTO
    )
    DestructiveNorm.num_sums = 0
    planned = PlannedModel(
        graph, table, 0, modules_of(graph, plan.mesh, 0, random_weights(graph, 3)), TorchCommunicator(plan.mesh, ())
    )
    assert torch.equal(planned(ids, batch.num_tokens), expected)
    assert DestructiveNorm.num_sums == 2 * (len(graph.order) - 2)


def test_a_sum_with_another_first_reader_stays_a_step_of_its_own() -> None:
    graph = model("qwen3")
    plan = compile_plan(graph, residual=Residual.SHARDED)
    modules = {n.spec.name: object() for n in graph.sections["layer"].nodes}
    modules |= {"attention_residual": ResidualAdd(), "mlp_residual": ResidualAdd()}
    section = plan.sections[1]
    steps, sums = sums_before_norms(section, modules)
    assert list(section.steps) == steps
    assert sums == {}
    assert leaves_open(section, modules)
    assert not takes_open(section, modules)


def test_the_runtime_graph_ends_with_hidden_states_and_joins_what_one_layer_computes() -> None:
    graph = model("deepseek_v3")
    together = ("experts", "shared_experts", "experts_plus_shared_experts")
    run = runtime_graph(graph, together)
    assert [n.spec.name for n in run.sections["exit"].nodes] == ["norm", "hidden_states"]
    names = [n.spec.name for n in run.sections["moe_layer"].nodes]
    assert [name for name in names if "expert" in name] == ["experts"]
    joint = run.sections["moe_layer"].node("experts").spec
    assert {"experts.router.weight", "shared_experts.down_proj.weight"} <= {p.name for p in joint.params}
    assert run.sections["dense_layer"] == graph.sections["dense_layer"]
    plan = compile_plan(run, "attn=tp2,dense=tp2,moe=ep2", num_rows=1)
    assert plan.num_collectives == 1 + 2 * 3 - 0
