# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the Blackwell kernel against the float64 reference, and its plan against that of Hopper."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sm100_dataflow import Batch, Decode, plan_of

from tokenspeed_plugin.kernels.mla.geometry import TILE_TOKENS
from tokenspeed_plugin.kernels.mla.reference import mla_decode_reference
from tokenspeed_plugin.kernels.mla.sm100 import arithmetic as at
from tokenspeed_plugin.kernels.mla.split import SplitPlan

NOWHERE = 1 << 20


def make_batch(
    seq_lens: list[int], tokens: list[int], heads: int, queries: int, page_tokens: int, groups: int, seed: int = 0
) -> Batch:
    """Random numbers in pages in random order; what no token owns holds NaN, tables end in pages that do not exist."""
    chance = np.random.default_rng(seed)
    pages = [-(-length // page_tokens) for length in seq_lens]
    order, table = chance.permutation(sum(pages) + 1), np.full((len(seq_lens), max(pages) + 1), NOWHERE)
    cache = np.full((len(order), page_tokens, 576), np.nan)
    for request, (length, count) in enumerate(zip(seq_lens, pages, strict=True)):
        table[request, :count], order = order[:count], order[count:]
        rows = chance.normal(size=(length, 576)) * chance.choice([0.3, 3.0])
        for page in range(count):
            part = rows[page * page_tokens : (page + 1) * page_tokens]
            cache[table[request, page], : len(part)] = part
    starts = [0, *np.cumsum(tokens).tolist()]
    q = chance.normal(size=(starts[-1] + 2, heads, 576))
    element = ("bfloat16", "float8_e4m3fn")[seed % 2]
    return Batch(q, cache, table, seq_lens, starts, queries, groups, 0.1, element)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    heads, queries = draw(st.sampled_from([(1, 1), (5, 3), (8, 2), (16, 1), (16, 8), (48, 1), (96, 1)]))
    seq_lens = draw(st.lists(st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 129, 300]), min_size=1, max_size=4))
    tokens = [draw(st.integers(0, queries)) if length else queries for length in seq_lens]
    page_tokens, groups = draw(st.sampled_from([16, 32, 64, 128])), draw(st.integers(1, 9))
    return make_batch(seq_lens, tokens, heads, queries, page_tokens, groups, draw(st.integers(0, 1 << 30)))


# A group that ends one request and begins another, both shared: two parts of its own.
@example(make_batch([129, 129], [1, 1], 5, 1, 16, 3))
@settings(max_examples=20, deadline=None)
@given(batches())
def test_it_adds_up_to_attention(batch: Batch) -> None:
    out, lse = Decode(batch).run()
    expected_out, expected_lse = mla_decode_reference(
        torch.from_numpy(batch.q),
        torch.from_numpy(batch.cache),
        torch.from_numpy(np.where(batch.table == NOWHERE, 0, batch.table)),
        torch.tensor(batch.seq_lens),
        batch.scale,
        query_starts=torch.tensor(batch.query_starts),
    )
    np.testing.assert_allclose(out, expected_out.numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse.numpy(), rtol=1e-9, atol=1e-12)


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=40), st.integers(1, 148))
def test_the_plan_is_that_of_hopper(lengths: list[int], groups: int) -> None:
    empty = np.zeros((0, 1, 576))
    words = plan_of(Batch(empty, empty, empty, lengths, [0] * (len(lengths) + 1), 1, groups, 1.0))
    expected = SplitPlan.of(lengths, groups)

    def array(word: str, count: int) -> list[int]:
        start = at.plan_offset(word, groups, len(lengths))
        return words[start : start + count]

    assert array("group_request", groups) == [span.request for span in expected.spans]
    assert array("group_tile", groups) == [span.first_tile for span in expected.spans]
    assert array("group_tiles", groups) == [span.tiles for span in expected.spans]
    assert array("first_group", len(lengths)) == list(expected.first_group)
    assert array("last_group", len(lengths)) == list(expected.last_group)


def test_the_words_of_a_plan_lie_behind_each_other() -> None:
    groups, requests = 7, 3
    names = (*at.SPLIT_WORDS, *at.REQUEST_WORDS, "tile_start")
    offsets = [at.plan_offset(name, groups, requests) for name in names]
    assert offsets == [0, 7, 14, 21, 28, 35, 38, 41]


@pytest.mark.parametrize("page_tokens", [16, 32, 64, 128, 256])
@given(token=st.integers(0, 100_000))
def test_every_token_has_one_place_in_its_page(page_tokens: int, token: int) -> None:
    shift, box = page_tokens.bit_length() - 1, min(page_tokens, TILE_TOKENS)
    tile, number = token // TILE_TOKENS, token % TILE_TOKENS // box
    assert at.box_page(tile, number, box, shift) == token // page_tokens
    assert at.box_in_page(tile, number, box, shift) * box + token % box == token % page_tokens


@pytest.mark.parametrize("row_bytes", [16, 32, 64, 128])
def test_a_swizzle_moves_whole_units_within_eight_rows(row_bytes: int) -> None:
    moved = [at.swizzled(offset, row_bytes) for offset in range(4096)]
    assert sorted(moved) == list(range(4096))
    assert all(a // 1024 == b // 1024 and a % 16 == b % 16 for a, b in enumerate(moved))
    # Eight rows that follow each other have each unit in another place: no two in the same banks.
    if row_bytes == 128:
        for unit in range(8):
            assert len({at.swizzled(row * 128 + unit * 16, 128) % 128 for row in range(8)}) == 8


@pytest.mark.parametrize("slots", [2, 5, 8, 11, 23])
def test_the_parity_of_a_slot_changes_with_each_filling(slots: int) -> None:
    for index in range(6 * slots):
        assert at.ring_slot(index, slots) == at.ring_slot(index + slots, slots)
        assert at.ring_phase(index, slots) != at.ring_phase(index + slots, slots)
