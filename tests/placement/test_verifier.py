# SPDX-License-Identifier: Apache-2.0
"""The verifier accepts every compiled plan and kills every mutant of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.placement.placement_cases import FAMILIES, SPECS, compile_plan, model
from tests.placement.plan_mutants import mutants
from tokenspeed_plugin.placement import Node, Param, PlacementError, Residual, Shard
from tokenspeed_plugin.placement.models.decoder import with_draft_outputs, with_pipeline
from tokenspeed_plugin.placement.verifier import VerificationError, verify, verify_section

STYLES = (Residual.REPLICATED, Residual.SHARDED)


@pytest.mark.parametrize("residual", STYLES)
@pytest.mark.parametrize(("spec", "world_size"), SPECS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_mutant_of_every_plan_is_killed(family: str, spec: str, world_size: int, residual: Residual) -> None:
    graph = model(family)
    plan = compile_plan(graph, spec, world_size, residual=residual)
    verify(graph, plan)
    tried, survivors = 0, []
    for name, mutant in mutants(graph, plan):
        tried += 1
        try:
            verify_section(graph, plan, mutant)
        except VerificationError:
            continue
        survivors.append(name)
    assert tried >= 20
    assert survivors == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_parameter_sharded_along_another_dimension_is_refused(family: str) -> None:
    graph = model(family)
    tried = 0
    for section in graph.sections.values():
        for index, node in enumerate(section.nodes):
            for param in node.spec.params:
                for changed in other_dims(param):
                    tried += 1
                    spec = replace(node.spec, params=tuple(changed if p is param else p for p in node.spec.params))
                    nodes = (*section.nodes[:index], Node(spec, node.reads), *section.nodes[index + 1 :])
                    sections = {**graph.sections, section.name: replace(section, nodes=nodes)}
                    with pytest.raises(PlacementError, match=node.spec.name):
                        replace(graph, sections=sections)
    assert tried >= 8


def other_dims(param: Param) -> list[Param]:
    return [
        replace(param, placements={**param.placements, axis: Shard(dim)})
        for axis, placement in param.placements.items()
        if isinstance(placement, Shard)
        for dim in range(len(param.dims))
        if dim != placement.dim
    ]


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 41])
def test_token_counts_that_do_not_divide_are_proven_too(num_tokens: int) -> None:
    graph = model("deepseek_v3")
    plan = compile_plan(
        graph, "attn=tp4,dense=tp4,moe=ep4", 4, num_tokens=num_tokens, num_rows=1, residual=Residual.SHARDED
    )
    verify(graph, plan)


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_large_worlds_pipelines_and_draft_outputs_are_proven(family: str, world_size: int) -> None:
    wide = {"num_attention_heads": 16, "num_key_value_heads": 4, "num_experts": 16, "n_routed_experts": 16}
    graph = model(family, **wide, num_local_experts=16)
    graph = with_pipeline(with_draft_outputs(graph, [0, 2]), 2)
    for residual in STYLES:
        spec = f"attn=tp{world_size},dense=tp{world_size},moe=ep{world_size}"
        verify(graph, compile_plan(graph, spec, world_size, num_tokens=64, residual=residual))


def test_the_message_names_section_module_rank_and_what_is_missing() -> None:
    graph = model("llama")
    plan = compile_plan(graph, residual=Residual.REPLICATED)
    name, mutant = next(m for m in mutants(graph, plan) if m[0].endswith("all-reduce of self_attn dropped"))
    with pytest.raises(VerificationError) as caught:
        verify_section(graph, plan, mutant)
    assert name.startswith("layer")
    assert str(caught.value) == (
        "section 'layer', module 'attention_residual': rank 0 gets 'self_attn' as 1 x self_attn[0], "
        "declared is 1 x self_attn[0] + 1 x self_attn[1]"
    )


def test_sections_out_of_order_or_with_other_ends_are_refused() -> None:
    graph = model("gpt_oss")
    plan = compile_plan(graph, residual=Residual.SHARDED)
    with pytest.raises(VerificationError, match="not the declared ones in order"):
        verify(graph, replace(plan, sections=plan.sections[::-1]))
    whole = compile_plan(graph, residual=Residual.REPLICATED)
    mixed = (*plan.sections[:2], *whole.sections[2:])
    with pytest.raises(VerificationError, match="expects the stream as R, it comes as S0"):
        verify(graph, replace(plan, sections=mixed))
