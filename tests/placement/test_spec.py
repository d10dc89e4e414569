# SPDX-License-Identifier: Apache-2.0
"""The specification: what it accepts, and that every refusal names the number."""

from __future__ import annotations

import pytest

from tests.placement.placement_cases import TABLE, model
from tests.placement.real_configs import REAL
from tokenspeed_plugin.placement import PlacementError, PlacementSpec
from tokenspeed_plugin.placement.choice import candidates, choose
from tokenspeed_plugin.placement.models import declare
from tokenspeed_plugin.placement.spec import check_runtime


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("attn=tp2,dense=tp2,moe=ep2", PlacementSpec(2, 2, 1, 2)),
        ("attn=tp4, dense=tp1, moe=tp2ep4", PlacementSpec(4, 1, 2, 4)),
        ("moe=tp8,attn=tp8,dense=tp8", PlacementSpec(8, 8, 8, 1)),
        ("attn=tp2,dense=tp4", PlacementSpec(2, 4, 4, 1)),
    ],
)
def test_parse(text: str, expected: PlacementSpec) -> None:
    assert PlacementSpec.parse(text) == expected
    assert PlacementSpec.parse(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("attn=tp2", r"'dense' is missing; the form is attn=tpN,dense=tpN,moe=tpN\|epN\|tpNepM"),
        ("attn=2,dense=tp2", "'attn=2' is not of the form"),
        ("attn=tp0,dense=tp2", "'attn=tp0' is not of the form"),
        ("attn=tp2,dense=tp2,moe=dp2", "'moe=dp2' is not of the form"),
        ("attn=tp2,dense=ep2", "'dense' has no experts: only tpN is allowed"),
        ("attn=tp2,attn=tp2,dense=tp2", "'attn' appears twice"),
        ("", "'' is not of the form"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        PlacementSpec.parse(text)


@pytest.mark.parametrize(
    ("family", "changes", "text", "message"),
    [
        ("llama", {}, "attn=tp16,dense=tp1", "8 heads are fewer than attn_tp=16"),
        (
            "llama",
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            "attn=tp8,dense=tp1",
            "12 heads do not divide",
        ),
        (
            "llama",
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            "attn=tp2,dense=tp1",
            "3 kv heads neither divide nor are divided by attn_tp=2",
        ),
        ("llama", {}, "attn=tp1,dense=tp5", "48 ffn do not divide evenly over dense_tp=5"),
        ("qwen3_moe", {}, "attn=tp1,dense=tp1,moe=ep16", "8 experts are fewer than ep=16"),
        ("gpt_oss", {}, "attn=tp1,dense=tp1,moe=tp5", "48 expert ffn do not divide evenly over moe_tp=5"),
        ("deepseek_v3", {}, "attn=tp1,dense=tp3,moe=tp1", "16 shared ffn do not divide evenly over dense_tp=3"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_by_number(
    family: str, changes: dict[str, int], text: str, message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        PlacementSpec.parse(text).check_model(model(family, **changes))


def test_a_world_that_does_not_fit_is_refused_by_number() -> None:
    graph = model("qwen3_moe")
    with pytest.raises(PlacementError, match="attn=tp4 does not divide the world size 6"):
        PlacementSpec(4, 2).mesh(6, graph)
    with pytest.raises(PlacementError, match="group sizes 2 and 3 do not nest"):
        PlacementSpec(2, 3).mesh(6, graph)
    with pytest.raises(PlacementError, match="attn=tp4 does not fit 8 ranks in dp=4 groups"):
        PlacementSpec(4, 4).mesh(8, graph, data_parallel=4)


def test_uneven_experts_fit() -> None:
    PlacementSpec.parse("attn=tp1,dense=tp1,moe=ep3").check_model(model("qwen3_moe"))


@pytest.mark.parametrize(
    ("spec", "dp", "message"),
    [
        (PlacementSpec(2, 4, 4, 1), 1, "attn=tp2: vLLM's attention takes the whole group, attn=tp4"),
        (PlacementSpec(4, 2, 4, 1), 1, "dense=tp2 is not tp1 or tp4"),
        (PlacementSpec(4, 4, 2, 2), 1, "moe is not tp4 or ep4"),
        (PlacementSpec(4, 4, 1, 4), 2, "dp=2: compiled MoE communication needs dp=1"),
    ],
)
def test_what_vllms_layers_cannot_have_is_refused_by_name(spec: PlacementSpec, dp: int, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        check_runtime(spec, 4, dp)
    check_runtime(PlacementSpec(4, 1, 1, 4), 4, 1)
    with pytest.raises(PlacementError, match="dense=tp1: shared experts take the whole group, dense=tp4"):
        check_runtime(PlacementSpec(4, 1, 1, 4), 4, 1, has_shared_experts=True)
    check_runtime(PlacementSpec(4, 4), 4, 2, has_experts=False)


def test_auto_takes_the_cheapest_that_fits() -> None:
    graph = declare("Qwen3-32B", REAL["Qwen3-32B"])
    found = candidates(graph, 8, TABLE)
    fitting = [c for c in found if c.refused is None]
    assert choose(graph, 8, TABLE) == min(fitting, key=lambda c: c.time_us).spec
    assert len(fitting) >= 2


def test_auto_does_not_replicate_what_the_memory_cannot_hold() -> None:
    graph = declare("Qwen3-235B-A22B", REAL["Qwen3-235B-A22B"])
    with pytest.raises(
        PlacementError, match=r"nothing fits 'Qwen3-235B-A22B' on 2 ranks: .*GB of weights per rank, over"
    ):
        choose(graph, 2, TABLE)


def test_auto_keeps_the_reason_of_every_refusal() -> None:
    graph = model("llama", num_attention_heads=6, num_key_value_heads=3)
    found = candidates(graph, 4, TABLE)
    assert choose(graph, 4, TABLE).attn_tp == 1
    assert {c.spec.attn_tp for c in found if c.refused is not None} == {4}
    assert all("6 heads do not divide evenly over attn_tp=4" in c.refused for c in found if c.refused is not None)
    assert choose(graph, 1, TABLE) == PlacementSpec(1, 1)
