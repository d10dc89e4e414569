# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism: a block number stands for one block on each rank, so it holds as many times more tokens."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from exact.driver import run_scenario
from exact.random_workload import Traffic, pool_for, random_workload
from scheduler_harness import class_of
from scheduler_knobs import Group, Knobs

from tokenspeed_plugin.host import names
from tokenspeed_plugin.kv_flat.groups import UnsupportedGroupError, groups_from

pytestmark = pytest.mark.host_matrix


@pytest.mark.parametrize("scheduler", ["vllm", "tokenspeed"])
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_exact_when_tokens_are_dealt_out_to_ranks(scheduler: str, seed: int) -> None:
    workload = random_workload(seed, Traffic(), 128)
    knobs = Knobs(groups=(Group(8),), budget_tokens=24, max_model_len=128, num_context_ranks=2)
    knobs = replace(knobs, num_blocks=pool_for(knobs, workload))
    report = run_scenario(class_of(scheduler, knobs), knobs, workload)
    assert report.tokens_delivered > 50


def test_a_sharded_window_is_refused_by_name() -> None:
    spec = type("SlidingWindowSpec", (), {"block_size": 4, "sliding_window": 8, "dcp_sharded": True})()
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer7"])
    assert groups_from([group])[0].block_tokens == 4
    with pytest.raises(UnsupportedGroupError, match=r"layer7.*sliding window.*2 ranks"):
        groups_from([group], 2)


def test_sharding_is_asked_of_each_group() -> None:
    sharded = names.FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=None)
    plain = names.FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=None, dcp_sharded=False)
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"]) for spec in (sharded, plain)]
    assert [group.block_tokens for group in groups_from(groups, 4)] == [16, 4]
