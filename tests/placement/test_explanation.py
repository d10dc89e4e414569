# SPDX-License-Identifier: Apache-2.0
"""Plans for published models and any world size move no more than vLLM's hand-written models where bytes are what costs."""

from __future__ import annotations

import json

import pytest

from tests.placement.placement_cases import BY_BYTES, TABLE
from tests.placement.real_configs import REAL
from tokenspeed_plugin.placement import PlacementError, PlacementSpec, Residual
from tokenspeed_plugin.placement.drawing import draw
from tokenspeed_plugin.placement.explanation import Step, explain
from tokenspeed_plugin.placement.models import declare


def specs(world_size: int) -> tuple[str, ...]:
    whole = f"attn=tp{world_size},dense=tp{world_size}"
    return tuple(
        dict.fromkeys(
            (
                f"{whole},moe=tp{world_size}",
                f"{whole},moe=ep{world_size}",
                f"attn=tp{world_size},dense=tp1,moe=ep{world_size}",
                f"attn=tp1,dense=tp1,moe=ep{world_size}",
                f"attn=tp2,dense=tp2,moe=ep{world_size}",
                f"attn=tp2,dense=tp2,moe=tp{world_size}",
            )
        )
    )


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
@pytest.mark.parametrize("name", REAL)
def test_bytes_and_collectives_are_at_most_those_of_vllm(name: str, world_size: int) -> None:
    graph = declare(name, REAL[name])
    tried = 0
    for text in specs(world_size):
        spec = PlacementSpec.parse(text)
        try:
            spec.check_model(graph)
        except PlacementError:
            continue
        tried += 1
        for residual, step in ((Residual.REPLICATED, Step(64, 64)), (Residual.AUTO, Step(8192, 16))):
            explained = explain(graph, spec, world_size, [step], table=BY_BYTES, residual=residual).steps[0]
            ours, theirs = explained.totals["ours"], explained.totals["vllm"]
            assert ours["ring_bytes"] <= theirs["ring_bytes"] * (1 + 1e-9), (text, residual)
            if residual is Residual.REPLICATED:
                assert ours["collectives"] <= theirs["collectives"], text
    assert tried >= 2


@pytest.mark.parametrize("residual", [Residual.REPLICATED, Residual.SHARDED])
@pytest.mark.parametrize("name", REAL)
def test_every_layer_moves_at_most_what_vllms_layer_moves(name: str, residual: Residual) -> None:
    graph = declare(name, REAL[name])
    explained = explain(graph, PlacementSpec.parse("attn=tp8,dense=tp8,moe=ep8"), 8, [Step(64, 64)], residual=residual)
    step = explained.steps[0]
    theirs = {row.section: 0.0 for row in step.baseline}
    for row in step.baseline:
        theirs[row.section] += row.ring_bytes
    steady = [s for s in step.plan.sections[2:-1] if "P" not in str(s.entry[0])]
    assert len(steady) > len(step.plan.sections) // 2
    for section in steady:
        assert section.ring_bytes <= theirs[section.section] * (1 + 1e-9)


def test_llama_on_two_ranks_by_hand() -> None:
    """One all-reduce of [64, 4096] bf16 sends 2 x 1/2 of 512 KiB: 65 of them, and logits of [64, 128256] half gathered."""
    graph = declare("Llama-3.1-8B", REAL["Llama-3.1-8B"])
    explained = explain(
        graph, PlacementSpec.parse("attn=tp2,dense=tp2"), 2, [Step(64, 64)], residual=Residual.REPLICATED
    )
    expected = {"collectives": 66, "ring_bytes": 65 * 64 * 4096 * 2 + 64 * 128256 * 2 / 2}
    for side in ("ours", "vllm"):
        totals = explained.steps[0].totals[side]
        assert {key: totals[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("world", "tokens", "fused"),
    [(2, 16, 65), (2, 8192, 65), (2, 8193, 0), (8, 16, 65), (8, 64, 0), (16, 1, 0)],
)
def test_fused_are_the_all_reduces_that_one_launch_takes(world: int, tokens: int, fused: int) -> None:
    """64 MiB / 8 KiB = 8192 rows on two ranks, 1 MiB / (7 x 8 KiB) = 18 on eight; sixteen are no GPUs of one host."""
    graph = declare("Llama-3.1-8B", REAL["Llama-3.1-8B"])
    spec = PlacementSpec.parse(f"attn=tp{world},dense=tp{world}")
    rows = explain(graph, spec, world, [Step(tokens, tokens)], residual=Residual.REPLICATED).steps[0].ours
    assert sum(row.times for row in rows if row.fused) == fused
    assert {row.fused for row in rows if row.collective == "all-gather"} == {""}
    if fused:
        assert {row.fused for row in rows if row.collective == "all-reduce"} == {"+norm", "+add+norm"}


def test_vllms_deepseek_with_data_parallelism_by_hand() -> None:
    """tp2 x dp4 with experts over 8: per MoE layer a reduce-scatter and an all-gather over 2, and both over 8."""
    graph = declare("DeepSeek-V3", REAL["DeepSeek-V3"])
    explained = explain(graph, PlacementSpec.parse("attn=tp2,dense=tp2,moe=ep8"), 8, [Step(64, 64)])
    rows = [row for row in explained.steps[0].baseline if row.section == "moe_layer"]
    whole = 64 * 7168 * 2
    assert explained.baseline_configuration == "-tp 2 -dp 4 --enable-expert-parallel"
    assert [(r.collective, r.num_ranks, r.ring_bytes) for r in rows] == [
        ("reduce-scatter", 2, whole / 4 / 2),
        ("all-gather", 8, whole * 7 / 8),
        ("reduce-scatter", 8, whole * 7 / 8),
        ("all-gather", 2, whole / 4 / 2),
    ]


def test_json_holds_every_collective_and_says_where_times_come_from() -> None:
    graph = declare("gpt-oss-120b", REAL["gpt-oss-120b"])
    result = explain(graph, PlacementSpec.parse("attn=tp4,dense=tp4,moe=ep4"), 4, [Step(1, 1), Step(8192, 1)])
    data = json.loads(json.dumps(result.as_dict()))
    assert data["cost_table"]["source"] == TABLE.source
    assert [s["num_tokens"] for s in data["steps"]] == [1, 8192]
    assert all(s["ours"] and s["vllm"] for s in data["steps"])


def test_drawing_has_a_box_for_every_step() -> None:
    graph = declare("DeepSeek-V3", REAL["DeepSeek-V3"])
    result = explain(graph, PlacementSpec.parse("attn=tp8,dense=tp8,moe=ep8"), 8, [Step(8192, 1)])
    plan = result.steps[0].plan
    section = plan.sections[-2]
    picture = draw(plan, section)
    assert picture.startswith("<svg")
    assert picture.count('rx="5"') == len(section.steps)
    for step in section.collectives:
        assert f"{step.kind.value} over {plan.mesh.label(step.atoms)}" in picture
