# SPDX-License-Identifier: Apache-2.0
"""Fault 27 (vllm PR 45207): pages of 64, 100 (a state) and 160 KiB end in a bare assertion at start-up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from exact.timeline import Timeline
from exact.workload import words
from scheduler_knobs import Knobs
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm_pages import attention, planned, state

from tokenspeed_plugin.host.config_gate import ConfigRefusedError, check
from tokenspeed_plugin.kv_flat.groups import UnsupportedGroupError, groups_from

pytestmark = pytest.mark.host_matrix

KIB = 1 << 10
LAYERS = {"narrow": attention(64, 2), "state": state(64, 100 * KIB), "wide": attention(64, 5)}
SIZES = {"block_size": 64, "hash_block_size": 64}


def test_the_smaller_pages_are_padded_and_the_start_says_for_whom(start_log: pytest.LogCaptureFixture) -> None:
    assert [spec.page_size_bytes // KIB for spec in LAYERS.values()] == [64, 100, 160]
    knobs, config = planned(LAYERS, Knobs(num_blocks=40, max_model_len=1024))
    run = Timeline("tokenspeed", knobs, kv_cache_config=config, **SIZES)
    assert {group.kv_cache_spec.page_size_bytes for group in config.kv_cache_groups} == {160 * KIB}
    assert "163,840 bytes, set by the states of 'state' (102,400 bytes)" in start_log.text
    assert "60.0% of a block of 'narrow'" in start_log.text
    assert "37.5% of a block of 'state'" in start_log.text
    for number in range(4):
        run.submit(f"r{number}", words(1, 200) + words(10 + number, 30), 8)
        run.finish(60)
    assert run.cached["r3"] == 192, "the tokens are right and prefixes are found, padding or not"


def test_attention_of_two_widths_is_named_too(start_log: pytest.LogCaptureFixture) -> None:
    layers = {"narrow": attention(64, 2), "wide": attention(64, 5)}
    groups = [KVCacheGroupSpec([name], replace(spec, page_size_padded=160 * KIB)) for name, spec in layers.items()]
    knobs, config = planned({"wide": layers["wide"]}, Knobs())
    knobs = replace(knobs, groups=knobs.groups * 2)
    Timeline("tokenspeed", knobs, kv_cache_config=replace(config, kv_cache_groups=groups), **SIZES)
    assert "163,840 bytes, set by the widest tokens of 'wide' (163,840 bytes)" in start_log.text
    assert "never used: 60.0% of a block of 'narrow'" in start_log.text
    assert "--kv-cache-dtype" not in start_log.text


def test_pages_without_a_loss_are_not_worth_a_word(start_log: pytest.LogCaptureFixture) -> None:
    knobs, config = planned({"one": attention(64, 2), "two": attention(64, 2)}, Knobs())
    Timeline("tokenspeed", knobs, kv_cache_config=config, **SIZES)
    assert "KV cache:" in start_log.text
    assert "KV cache blocks" not in start_log.text


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        (
            replace(LAYERS["state"], mamba_cache_mode="all"),
            "layer 'culprit' keeps states in mode 'all'; allowed: align, none",
        ),
        (
            replace(LAYERS["state"], num_speculative_blocks=2),
            "layer 'culprit' keeps states for 2 draft tokens; allowed: none",
        ),
        (SimpleNamespace(), "KV cache group of layer 'culprit' is a SimpleNamespace; known kinds: "),
    ],
    ids=["mode", "drafts", "kind"],
)
def test_a_layer_that_does_not_fit_is_named(spec: Any, complaint: str) -> None:
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["culprit", "another"])
    with pytest.raises(UnsupportedGroupError) as error:
        groups_from([group])
    assert str(error.value).startswith(complaint)


def test_a_drafter_beside_states_is_refused_by_name_before_anything_is_laid_out() -> None:
    """In the report the larger page belonged to a drafter's layer."""
    model = SimpleNamespace(is_hybrid=True)
    config = SimpleNamespace(model_config=model, speculative_config=SimpleNamespace(method="mtp"))
    with pytest.raises(ConfigRefusedError, match=r"speculative_config\.method='mtp', model_config\.is_hybrid=True"):
        check(config)
