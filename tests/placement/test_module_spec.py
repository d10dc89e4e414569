# SPDX-License-Identifier: Apache-2.0
"""A declared boundary has to follow from the parameter placements; every slip is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.placement.placement_cases import FAMILIES, model
from tokenspeed_plugin.placement import ModuleSpec, Param, Partial, PlacementError, Replicate, Shard
from tokenspeed_plugin.placement.models import blocks


def change(spec: ModuleSpec, name: str, **fields: object) -> ModuleSpec:
    return replace(spec, params=tuple(replace(p, **fields) if p.name == name else p for p in spec.params))


@pytest.mark.parametrize("family", FAMILIES)
def test_shipped_declarations_hold(family: str) -> None:
    for module in model(family).modules():
        module.check()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            change(blocks.mlp("mlp"), "down_proj.weight", placements={"dense_tp": Shard(0)}),
            r"module 'mlp', axis 'dense_tp': its parameters shard different dimensions: ffn, hidden",
        ),
        (
            change(blocks.mlp("mlp"), "down_proj.weight", placements={}),
            r"parameter 'down_proj.weight' \('hidden', 'ffn'\) is declared R, 'ffn' needs S1",
        ),
        (
            change(blocks.mlp("mlp", bias=True), "down_proj.bias", placements={}),
            r"parameter 'down_proj.bias' \('hidden',\) is declared R, 'ffn' needs P",
        ),
        (
            replace(blocks.mlp("mlp"), output=blocks.mlp("mlp").inputs[0]),
            r"output \('tokens', 'hidden'\) is declared R but the parameters imply P",
        ),
        (
            change(blocks.attention("a", 4), "k_proj.weight", placements={"attn_tp": Shard(1)}),
            r"module 'a', axis 'attn_tp': its parameters shard different dimensions: head_dim, heads",
        ),
        (
            replace(blocks.lm_head(), output=replace(blocks.lm_head().output, placements={"attn_tp": Shard(0)})),
            r"output \('rows', 'vocab'\) is declared S0 but the parameters imply S1",
        ),
        (
            replace(
                blocks.norm("n"),
                inputs=(replace(blocks.norm("n").inputs[0], placements={"attn_tp": Partial()}),),
            ),
            r"no parameter is sharded, so inputs and output are all R or all S0, not P, R",
        ),
    ],
)
def test_a_wrong_declaration_is_named(spec: ModuleSpec, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        spec.check()


def test_key_value_heads_follow_the_query_heads() -> None:
    param = Param("k", ("kv_heads",), {"attn_tp": Shard(0)}, {"kv_heads": ("heads", 4)})
    assert param.sharded_dim("attn_tp") == "heads"
    assert replace(param, placements={"attn_tp": Replicate()}).sharded_dim("attn_tp") is None
