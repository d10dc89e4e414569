# SPDX-License-Identifier: Apache-2.0
"""Which prefills on a cached prefix our kernel takes from vLLM's backend."""

from __future__ import annotations

import pytest

from tokenspeed_plugin.kernels.autotune import SHIPPED, TuningStore, TuningTable
from tokenspeed_plugin.kernels.mla.cached_prefill.solutions import MODE, UNFOLDED
from tokenspeed_plugin.kernels.mla.prefill_share import PrefillShare
from tokenspeed_plugin.kernels.mla.share import PAGE_TOKENS
from tokenspeed_plugin.kernels.mla.solutions import BF16, decode_shape

NAMES = ("head_groups", "flashattn3", "unfolded")


def share(
    times: dict[tuple[int, int], tuple[float, ...]], heads: int = 16, measured: int = 16, max_context: int = 1 << 20
) -> PrefillShare:
    """Times of ours, vLLM's absorbed and its unfolded way by new and cached tokens."""
    table = TuningTable()
    for (queries, context), microseconds in times.items():
        shape = decode_shape(measured, queries, PAGE_TOKENS, 1, context)
        table.record("mla", MODE, BF16, shape, dict(zip(NAMES, microseconds, strict=False)))
    return PrefillShare(heads, max_context, table)


def test_up_to_512_new_tokens_it_is_held_against_the_absorbed_way_and_above_against_the_other() -> None:
    found = share({(512, 65536): (10, 12, 9), (1024, 65536): (10, 9, 12)})
    assert found.verdict(512, 65536).taken
    assert found.verdict(513, 65536).reason == "1.11 x the time of unfolded (measured with 512 new tokens on 65536)"
    assert found.verdict(1024, 65536).taken
    assert not found.verdict(512, 65536, UNFOLDED).taken


def test_the_nearest_measurement_counts_within_a_factor_of_two() -> None:
    found = share({(256, 32768): (10, 12, 12), (256, 131072): (13, 12, 12)})
    assert [found.verdict(256, context).taken for context in (16384, 60000, 70000)] == [True, True, False]
    assert found.verdict(256, 16383).reason == "not measured, the nearest is 256 new tokens on 32768"
    assert found.verdict(127, 32768).reason == "not measured, the nearest is 256 new tokens on 32768"
    assert found.verdict(256, 0).reason == "nothing is cached"
    assert share({}).verdict(256, 100).reason == "nothing was measured"


@pytest.mark.parametrize(
    ("ratios", "limit"),
    [
        ({64: 2.0, 128: 1.1, 256: 0.9, 512: 0.5}, 181),
        ({64: 2.0, 128: 0.9, 256: 1.1, 512: 0.5}, 362),
        ({256: 0.9, 512: 0.5}, 255),
        ({256: 0.9, 512: 1.5}, 512),
        ({}, 512),
    ],
)
def test_the_limit_lies_in_the_middle_of_the_last_worse_and_the_first_better(
    ratios: dict[int, float], limit: int
) -> None:
    found = share({(queries, 65536): (10 * ratio, 10, 10) for queries, ratio in ratios.items()})
    assert found.absorbed_limit == limit
    assert found.takes_anything() is (min(ratios.values(), default=2) < 1)


def test_the_limit_goes_by_the_worst_length_that_the_model_can_reach() -> None:
    times = {(512, 8192): (12.0, 10.0, 10.0), (512, 65536): (9.0, 10.0, 10.0)}
    assert share(times).absorbed_limit == 512  # 1.2 x theirs at worst, they at worst 1.11 x ours
    assert share({**times, (512, 131072): (5.0, 10.0, 10.0)}).absorbed_limit == 511
    assert share({**times, (512, 131072): (5.0, 10.0, 10.0)}, max_context=65536).absorbed_limit == 512


def test_a_batch_keeps_vllms_threshold_unless_one_of_its_prefills_is_better_off() -> None:
    found = share({(256, 65536): (9, 10, 10), (512, 8192): (11, 10, 10), (512, 65536): (5, 10, 10)})
    assert found.absorbed_limit == 255
    assert found.threshold([(1, 70000), (300, 65536)]) == 255
    assert found.threshold([(1, 70000), (255, 65536), (500, 8192), (4000, 65536)]) == 512


def test_a_head_count_that_was_not_measured_goes_by_the_next_larger() -> None:
    times = {(1024, 65536): (9.0, 10.0, 10.0)}
    assert share(times, heads=20, measured=32).verdict(1024, 65536).taken
    assert not share(times, heads=33, measured=32).takes_anything()


def test_the_shipped_table_leaves_vllm_what_it_does_faster() -> None:
    table = TuningStore(SHIPPED).load("NVIDIA H200")
    assert [PrefillShare(heads, 131072, table).absorbed_limit for heads in (16, 128)] == [181, 255]
    found = PrefillShare(16, 131072, table)
    assert [found.verdict(queries, 65536).taken for queries in (64, 128, 256, 2048)] == [False, False, True, True]
