# SPDX-License-Identifier: Apache-2.0
"""Which collectives the compiler inserts, defers and merges, and that every rank gets the same plan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.placement.placement_cases import TABLE, compile_plan, model
from tokenspeed_plugin.placement import (
    Conversion,
    Freedom,
    IllegalConversionError,
    ModelGraph,
    ModuleKind,
    ModuleSpec,
    Node,
    Partial,
    Port,
    Residual,
    Section,
    SectionPlan,
    Shard,
)
from tokenspeed_plugin.placement.graph import STREAM
from tokenspeed_plugin.placement.models import blocks
from tokenspeed_plugin.placement.models.decoder import (
    entry,
    leave,
    parallel_layer,
    with_draft_outputs,
    with_pipeline,
)
from tokenspeed_plugin.placement.plan import FusionKind

AR, AG, RS = Conversion.ALL_REDUCE, Conversion.ALL_GATHER, Conversion.REDUCE_SCATTER


def collectives(plan: SectionPlan) -> list[tuple[Conversion, str]]:
    return [(m.kind, m.value) for m in plan.collectives]


def test_replicated_residual_reduces_each_half_once_and_fuses_it_with_add_and_norm() -> None:
    layer = compile_plan(model("llama"), residual=Residual.REPLICATED).sections[2]
    assert collectives(layer) == [(AR, "self_attn"), (AR, "mlp")]
    assert [f.kind for f in layer.fusions] == [FusionKind.ALL_REDUCE_ADD_NORM] * 2
    assert [f.crosses for f in layer.fusions] == [False, True]


def test_sharded_residual_scatters_before_the_norm_and_gathers_after_it() -> None:
    plan = compile_plan(model("llama"), residual=Residual.SHARDED)
    assert collectives(plan.sections[2]) == [
        (AG, "input_layernorm"),
        (RS, "self_attn"),
        (AG, "post_attention_layernorm"),
        (RS, "mlp"),
    ]
    assert {f.kind for f in plan.sections[2].fusions} == {FusionKind.SHARDED_NORM}


def test_the_embedding_is_reduced_in_layer_0_and_then_only_scattered() -> None:
    plan = compile_plan(model("llama"), residual=Residual.SHARDED)
    assert collectives(plan.sections[0]) == []
    assert collectives(plan.sections[1])[0] == (RS, STREAM)


@pytest.mark.parametrize("spec", ["attn=tp2,dense=tp2,moe=tp2", "attn=tp2,dense=tp2,moe=ep2"])
def test_routed_and_shared_experts_share_one_reduction(spec: str) -> None:
    plan = compile_plan(model("deepseek_v3"), spec, residual=Residual.REPLICATED)
    assert collectives(plan.sections[-2]) == [(AR, "self_attn"), (AR, "experts_plus_shared_experts")]


def parallel_model() -> ModelGraph:
    layer = parallel_layer("layer", blocks.attention("self_attn", 1), blocks.mlp("mlp"))
    sizes = {"hidden": 32, "vocab": 64, "heads": 4, "kv_heads": 4, "head_dim": 8, "ffn": 64}
    sections = {s.name: s for s in (entry(), layer, leave())}
    return ModelGraph("parallel", sections, ("entry", "layer", "layer", "exit"), sizes)


def test_parallel_blocks_reduce_attention_and_mlp_together() -> None:
    layer = compile_plan(parallel_model(), residual=Residual.REPLICATED).sections[2]
    assert collectives(layer) == [(AR, "branches")]


def test_a_pre_norm_model_does_not_merge_what_the_norm_needs_apart() -> None:
    layer = compile_plan(model("qwen3"), residual=Residual.REPLICATED).sections[2]
    assert len(layer.collectives) == 2


def test_gemma_reduces_before_its_inner_norms() -> None:
    layer = compile_plan(model("gemma3"), residual=Residual.REPLICATED).sections[2]
    assert collectives(layer) == [(AR, "self_attn"), (AR, "mlp")]
    assert {f.kind for f in layer.fusions} == {FusionKind.ALL_REDUCE_NORM}


def test_prefill_and_decode_get_different_plans() -> None:
    graph = model("llama", hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8)
    spec = "attn=tp8,dense=tp8"
    decode = compile_plan(graph, spec, 8, num_tokens=8, num_rows=8)
    prefill = compile_plan(graph, spec, 8, num_tokens=16384, num_rows=4)
    assert {m.kind for m in decode.sections[2].collectives} == {AR}
    assert {m.kind for m in prefill.sections[2].collectives} == {AG, RS}
    assert (decode.token_multiple, prefill.token_multiple) == (1, 8)


def test_the_stream_is_whole_where_a_pipeline_stage_sends_it() -> None:
    graph = with_pipeline(model("llama"), 2)
    assert graph.order == ("entry", "layer", "pipeline_send", "layer", "layer", "exit")
    plan = compile_plan(graph, residual=Residual.SHARDED)
    assert collectives(plan.sections[2]) == [(AG, STREAM)]


def test_draft_hidden_states_are_gathered() -> None:
    graph = with_draft_outputs(model("llama"), [1])
    assert graph.order == ("entry", "layer", "layer+draft", "layer", "exit")
    plan = compile_plan(graph, residual=Residual.SHARDED)
    assert (AG, "mlp_residual") in collectives(plan.sections[2])
    assert (AG, "mlp_residual") not in collectives(plan.sections[1])


def test_quantised_input_halves_the_gather_only_when_the_run_time_does_it() -> None:
    from tokenspeed_plugin.placement import Compiler, PlacementSpec
    from tokenspeed_plugin.placement.cost import CostModel

    graph = model("qwen3", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    mesh = PlacementSpec.parse("attn=tp2,dense=tp2").mesh(2, graph)
    moved = []
    for quantised in (False, True):
        cost = CostModel(graph, mesh, TABLE, 64, 8, quantised_gathers=quantised)
        plan = Compiler(cost, Residual.SHARDED).compile()
        gather = next(m for m in plan.sections[2].collectives if m.kind is AG)
        moved.append(gather.ring_bytes)
        kinds = {f.kind for f in plan.sections[2].fusions}
        assert (FusionKind.QUANTISED_GATHER in kinds) is quantised
    assert moved[1] == pytest.approx(moved[0] * (1 + 4 / 128) / 2)


def test_an_illegal_neighbour_is_named_with_module_and_axis() -> None:
    hidden = ("tokens", "hidden")
    takes_parts = ModuleSpec(
        "partial_reader",
        ModuleKind.SCALE,
        (Port(hidden, {"attn_tp": Partial()}),),
        Port(hidden, {"attn_tp": Partial()}),
        freedom=Freedom.TOKENS,
    )
    gives_shards = ModuleSpec(
        "shard_maker",
        ModuleKind.SCALE,
        (Port(hidden, {"attn_tp": Shard(1)}),),
        Port(hidden, {"attn_tp": Shard(1)}),
        freedom=Freedom.TOKENS,
    )
    section = Section(
        "only", (Node(gives_shards, (STREAM,)), Node(takes_parts, ("shard_maker",))), Port(hidden), "partial_reader"
    )
    graph = ModelGraph("illegal", {"only": section}, ("only",), {"hidden": 8})
    with pytest.raises(IllegalConversionError) as caught:
        compile_plan(graph)
    for part in ("'shard_maker'", "'partial_reader'", "S1", "'attn_tp'", "section 'only'"):
        assert part in str(caught.value)


SHOW_SHAPE = """
from tests.placement.placement_cases import compile_plan, model
for family in ("deepseek_v3", "gpt_oss"):
    print(compile_plan(model(family), "attn=tp2,dense=tp2,moe=ep8", 8).shape())
"""


def test_every_rank_gets_the_same_plan_whatever_its_hash_seed() -> None:
    here = str(Path(__file__).parents[2])
    shapes = set()
    for seed in ("1", "2", "3"):
        paths = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths}
        shapes.add(subprocess.run([sys.executable, "-c", SHOW_SHAPE], env=env, check=True, capture_output=True).stdout)
    assert len(shapes) == 1
