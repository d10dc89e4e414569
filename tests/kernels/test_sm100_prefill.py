# SPDX-License-Identifier: Apache-2.0
"""Prefill: the kernel's arithmetic in NumPy, tile by tile, against the float64 reference, and that against torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sm100_dataflow import NumpyMath

from tokenspeed_plugin.kernels.mla.prefill_reference import mla_prefill_reference
from tokenspeed_plugin.kernels.mla.sm100 import formulas
from tokenspeed_plugin.kernels.mla.sm100.arithmetic import SOFTMAX_RANGES
from tokenspeed_plugin.kernels.mla.sm100.model import B200, estimate_prefill
from tokenspeed_plugin.kernels.mla.sm100.prefill.arithmetic import probability_offset, tiles_upto, visible_tokens
from tokenspeed_plugin.kernels.mla.sm100.prefill.layout import KV_TILE, QUERY_TILE

REACH = SOFTMAX_RANGES["bfloat16"]
SIZES = [0, 1, 63, 127, 128, 129, 300]


def boxed(tensor: np.ndarray, start: int) -> np.ndarray:
    """128 tokens from a place on, as a bulk copy brings them: zeros past the tensor's end."""
    rows = tensor[start : start + KV_TILE]
    return np.concatenate([rows, np.zeros((KV_TILE - len(rows), tensor.shape[1]))])


def attend_block(q: np.ndarray, k: np.ndarray, v: np.ndarray, spans: tuple[int, ...], scale: float, causal: bool):
    """One block: the output and lse of its 128 rows, those past the request's end included."""
    query_start, query_tokens, first_row, kv_start, kv_tokens = spans
    last_row = min(first_row + QUERY_TILE, query_tokens) - 1
    tiles = tiles_upto(max(visible_tokens(last_row, query_tokens, kv_tokens, causal), 0))
    rows = boxed(q, query_start + first_row)
    seen = visible_tokens(first_row + np.arange(QUERY_TILE), query_tokens, kv_tokens, causal)
    seen = np.minimum(np.broadcast_to(seen, QUERY_TILE), kv_tokens)
    top, total, out = np.full(QUERY_TILE, -math.inf), np.zeros(QUERY_TILE), np.zeros((QUERY_TILE, 128))
    for tile in range(tiles):
        scores = rows @ boxed(k, kv_start + tile * KV_TILE).T
        scores = np.where(tile * KV_TILE + np.arange(KV_TILE) >= seen[:, None], -math.inf, scores)
        fresh = np.fmax.reduce(scores, axis=1) * scale * formulas.LOG2_E
        lags = (fresh > top + REACH.lag_log2) | (tile == 0)
        for warp in range(0, QUERY_TILE, 32):
            mine = slice(warp, warp + 32)
            if lags[mine].any():
                top[mine], factor = formulas.raised(NumpyMath, top[mine], fresh[mine])
                total[mine], out[mine] = total[mine] * factor, out[mine] * factor[:, None]
        probs = formulas.probability(NumpyMath, scores, scale * formulas.LOG2_E, top[:, None], REACH.bias_log2)
        values = boxed(v, kv_start + tile * KV_TILE)
        values[max(kv_tokens - tile * KV_TILE, 0) :] = 0.0  # clear_values
        total, out = total + probs.sum(1), out + probs @ values
    factor, lse = formulas.row_end(NumpyMath, top, total, 1.0, REACH.bias_log2)
    return np.where(factor[:, None] > 0.0, out * factor[:, None], 0.0), lse * formulas.LN_2


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES)), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 1 << 30),
)
def test_it_adds_up_to_attention(requests: list[tuple[int, int]], causal: bool, seed: int) -> None:
    chance = np.random.default_rng(seed)
    query_starts, kv_starts = ([0, *np.cumsum(column).tolist()] for column in zip(*requests, strict=True))
    q, k = chance.normal(size=(query_starts[-1], 192)) * 3.0, chance.normal(size=(kv_starts[-1], 192))
    v = chance.normal(size=(kv_starts[-1], 128))
    expected, expected_lse = mla_prefill_reference(
        *(torch.from_numpy(x)[:, None] for x in (q, k, v)),
        torch.tensor(query_starts),
        torch.tensor(kv_starts),
        0.1,
        causal=causal,
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        for request, (query_tokens, kv_tokens) in enumerate(requests):
            for first_row in range(0, query_tokens, QUERY_TILE):
                spans = (query_starts[request], query_tokens, first_row, kv_starts[request], kv_tokens)
                # Another request holds NaN: it must not reach this one.
                lone = [np.full_like(x, np.nan) for x in (q, k, v)]
                for own, whole, starts in zip(lone, (q, k, v), (query_starts, kv_starts, kv_starts), strict=True):
                    own[starts[request] : starts[request + 1]] = whole[starts[request] : starts[request + 1]]
                out, lse = attend_block(*lone, spans, 0.1, causal)
                rows = min(query_tokens - first_row, QUERY_TILE)
                at = query_starts[request] + first_row
                np.testing.assert_allclose(out[:rows], expected[at : at + rows, 0].numpy(), rtol=1e-9, atol=1e-12)
                np.testing.assert_allclose(lse[:rows], expected_lse[at : at + rows, 0].numpy(), rtol=1e-9)


def test_the_reference_is_torchs_attention() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 3, 192), torch.randn(9, 3, 192), torch.randn(9, 3, 128)
    starts = (torch.tensor([0, 2, 5]), torch.tensor([0, 2, 9]))
    out, _ = mla_prefill_reference(q, k, v, *starts, 0.2, dtype=torch.float32)
    heads_first = [part.transpose(0, 1) for part in (q[:2], k[:2], v[:2])]
    square = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, scale=0.2)
    torch.testing.assert_close(out[:2], square.transpose(0, 1))
    last = torch.nn.functional.scaled_dot_product_attention(
        *(part.transpose(0, 1) for part in (q[4:], k[2:], v[2:])), scale=0.2
    )
    torch.testing.assert_close(out[4:], last.transpose(0, 1))


def test_every_probability_has_its_own_place() -> None:
    places = [probability_offset(row, unit) for row in range(128) for unit in range(16)]
    assert sorted(places) == list(range(0, 128 * 128 * 2, 16))


@pytest.mark.parametrize(("tokens", "tiles"), [(0, 0), (1, 1), (128, 1), (129, 2)])
def test_tiles(tokens: int, tiles: int) -> None:
    assert tiles_upto(tokens) == tiles


def test_the_model_of_a_long_prefill_is_bound_by_the_tensor_cores() -> None:
    """All FLOPs of the lower triangle at the full rate, and the half tiles on its edge."""
    estimate = estimate_prefill([(8192, 8192)], heads=16)
    flops = 2 * 16 * 8192 * 8192 / 2 * (192 + 128)
    floor = flops / (B200.multiprocessors * B200.bf16_flops_per_clock * B200.clock_per_us)
    assert estimate.bound == "tensor cores"
    assert floor < estimate.expected_us < 1.05 * floor


def test_the_model_knows_that_few_blocks_wait_for_the_longest() -> None:
    """KV is not split: 16 blocks or 128, the last rows see all 512 tiles."""
    few, many = (estimate_prefill([(rows, 65536)], heads=16).tensor_cores_us for rows in (128, 1024))
    assert few == many == pytest.approx(512 * 1280 / B200.clock_per_us)
