# SPDX-License-Identifier: Apache-2.0
"""The split plan: every tile once, spans that differ by one tile at most, few shared requests."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokenspeed_plugin.kernels.mla.geometry import TILE_TOKENS
from tokenspeed_plugin.kernels.mla.split import GroupSpan, SplitPlan

LENGTHS = st.lists(st.integers(0, 5000), min_size=1, max_size=40)
GROUPS = st.integers(1, 132)


def tiles_of(length: int) -> int:
    return -(-length // TILE_TOKENS)


def walk(span: GroupSpan, lengths: list[int]) -> list[tuple[int, int]]:
    """(request, tile) in the order in which a block meets them."""
    met, request, tile = [], span.request, span.first_tile
    while len(met) < span.tiles:
        if tile >= tiles_of(lengths[request]):
            request, tile = request + 1, 0
            continue
        met.append((request, tile))
        tile += 1
    return met


def test_one_long_request_spreads_over_all_groups() -> None:
    plan = SplitPlan.of([10 * TILE_TOKENS], 4)
    assert plan.spans == (GroupSpan(0, 0, 2), GroupSpan(0, 2, 3), GroupSpan(0, 5, 2), GroupSpan(0, 7, 3))
    assert (plan.first_group, plan.last_group) == ((0,), (3,))


def test_groups_without_work_come_last() -> None:
    plan = SplitPlan.of([0, 65, 0], 4)
    assert [span.tiles for span in plan.spans] == [1, 1, 0, 0]
    assert (plan.first_group, plan.last_group) == ((0, 0, 0), (-1, 1, -1))


@given(LENGTHS, GROUPS)
@example([0], 3)
@example([0, 0, 64], 132)
def test_every_tile_is_done_once_in_order(lengths: list[int], groups: int) -> None:
    plan = SplitPlan.of(lengths, groups)
    done = [met for span in plan.spans for met in walk(span, lengths)]
    assert done == [(request, tile) for request, length in enumerate(lengths) for tile in range(tiles_of(length))]


@given(LENGTHS, GROUPS)
def test_spans_differ_by_one_tile_at_most(lengths: list[int], groups: int) -> None:
    counts = [span.tiles for span in SplitPlan.of(lengths, groups).spans]
    assert max(counts) - min(counts) <= 1


@given(LENGTHS, GROUPS)
def test_the_groups_of_a_request_are_those_that_meet_it(lengths: list[int], groups: int) -> None:
    plan = SplitPlan.of(lengths, groups)
    for request, length in enumerate(lengths):
        meeting = [g for g, span in enumerate(plan.spans) if any(r == request for r, _ in walk(span, lengths))]
        claimed = list(range(plan.first_group[request], plan.last_group[request] + 1))
        assert meeting == (claimed if length > 0 else [])


@given(LENGTHS, GROUPS)
def test_a_group_shares_at_most_two_requests(lengths: list[int], groups: int) -> None:
    """So that two partial slots per group are enough."""
    plan = SplitPlan.of(lengths, groups)
    for group in range(groups):
        shared = [
            request
            for request, (first, last) in enumerate(zip(plan.first_group, plan.last_group, strict=True))
            if first <= group <= last and first < last
        ]
        assert len(shared) <= 2


@pytest.mark.parametrize(("lengths", "groups"), [([], 4), ([64], 0)])
def test_nothing_to_plan_is_refused(lengths: list[int], groups: int) -> None:
    with pytest.raises(ValueError, match="both must be at least 1"):
        SplitPlan.of(lengths, groups)
