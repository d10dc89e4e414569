# SPDX-License-Identifier: Apache-2.0
"""What the cost model itself chooses for a model of the benchmark."""

from __future__ import annotations

from typing import Any

from tokenspeed_plugin.placement.cost import CostModel, CostTable
from tokenspeed_plugin.placement.models import declare
from tokenspeed_plugin.placement.models.bindings import binding_of
from tokenspeed_plugin.placement.models.runtime_graph import runtime_graph
from tokenspeed_plugin.placement.plan_table import PlanTable
from tokenspeed_plugin.placement.spec import PlacementSpec


def splits_residual(name: str, config: dict[str, Any], num_ranks: int, num_tokens: int) -> bool:
    """Whether ``--placement auto`` splits the residual stream by tokens in a step of ``num_tokens``, by the shipped table."""
    graph = declare(name, {**config, "dtype": "bfloat16"})
    spec = PlacementSpec.parse(f"attn=tp{num_ranks},dense=tp{num_ranks},moe=tp{num_ranks}")
    mesh, table = spec.mesh(num_ranks, graph, data_parallel=1), CostTable.load()
    run = runtime_graph(graph, binding_of(config["architectures"][0]).together)
    plans = PlanTable.build(lambda tokens: CostModel(run, mesh, table, tokens, 1), num_tokens)
    return plans.plans[plans.index(num_tokens)].token_multiple > 1
