# SPDX-License-Identifier: Apache-2.0
"""Which decode batches a kernel takes from the host's backend."""

from __future__ import annotations

import pytest
from kernel_fixtures import make_spec

from tokenspeed_plugin.kernels.autotune import TuningTable
from tokenspeed_plugin.kernels.mla.share import PAGE_TOKENS, DecodeShare, rounded_query_tokens
from tokenspeed_plugin.kernels.mla.solutions import BF16, decode_shape
from tokenspeed_plugin.kernels.registry import ShapeTrait

SPEC = make_spec("fast", traits=(ShapeTrait("query_tokens", 1, 8), ShapeTrait("heads", 1, 128)))


def share(times: dict[tuple[int, int, int, int], tuple[float, float]], heads: int = 16, **options) -> DecodeShare:
    """Times of ours and the host's by heads, query tokens, requests and context."""
    table = TuningTable()
    for (measured_heads, query_tokens, requests, context), (ours, host) in times.items():
        shape = decode_shape(measured_heads, query_tokens, PAGE_TOKENS, requests, context)
        table.record("mla", "decode", BF16, shape, {"fast": ours, "host": host})
    return DecodeShare(SPEC, "host", heads, options.pop("max_context", 65536), table, **options)


def test_query_tokens_are_rounded_up() -> None:
    assert [rounded_query_tokens(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, None]


@pytest.mark.parametrize(
    ("short", "long", "taken"),
    [
        ((10, 20), (30, 31), True),
        ((10, 12), (31, 30), True),  # at worst 1.03 x theirs, they at worst 1.2 x ours
        ((10, 10.1), (33, 30), False),
        ((10, 10), (30, 30), True),
    ],
)
def test_the_worst_of_all_lengths_decides(short: tuple[float, float], long: tuple[float, float], taken: bool) -> None:
    found = share({(16, 1, 1, 8192): short, (16, 1, 1, 65536): long})
    assert found.takes(1, 1) is taken


def test_lengths_that_the_model_cannot_reach_do_not_count() -> None:
    times = {(16, 1, 1, 8192): (10.0, 20.0), (16, 1, 1, 65536): (90.0, 30.0)}
    assert not share(times).takes(1, 1)
    assert share(times, max_context=8192).takes(1, 1)
    assert share(times, max_context=1000).takes(1, 1)  # the shortest that was measured


def test_the_nearest_number_of_requests_and_the_next_larger_head_count_stand_in() -> None:
    found = share({(32, 1, 1, 8192): (1.0, 2.0), (32, 1, 16, 8192): (2.0, 1.0)}, heads=20)
    assert [found.takes(1, n) for n in (1, 3, 4, 16, 500)] == [True, True, False, False, False]
    assert found.verdict(1, 2).reason == "0.50 to 0.50 x the time of host (measured with 32 heads, 1 requests)"
    assert not share({(16, 1, 1, 8192): (1.0, 2.0)}, heads=20).takes_anything()


def test_what_was_not_measured_is_taken_by_name_only() -> None:
    assert share({}).verdict(2, 1).reason == "nothing was measured for 2 query tokens"
    named = share({}, named=True)
    assert (named.takes(8, 1000), named.takes(9, 1)) == (True, False)
    assert named.verdict(9, 1).reason == "9 query tokens, at most 8 are taken"
    assert not share({}, heads=200, named=True).takes_anything()
