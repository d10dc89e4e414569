# SPDX-License-Identifier: Apache-2.0
"""The reference of MLA decode against the definition written out token by token in float64."""

from __future__ import annotations

import math

import torch

from tokenspeed_plugin.kernels.mla.reference import mla_decode_reference


def by_hand(q: torch.Tensor, tokens: torch.Tensor, visible: int, scale: float) -> tuple[torch.Tensor, float]:
    scores = [scale * float(torch.dot(q, tokens[i])) for i in range(visible)]
    lse = math.log(sum(math.exp(score) for score in scores))
    out = sum(math.exp(score - lse) * tokens[i, :512] for i, score in enumerate(scores))
    assert isinstance(out, torch.Tensor)
    return out, lse


def test_each_row_is_the_softmax_over_what_it_may_see() -> None:
    torch.manual_seed(0)
    cache = torch.randn(8, 4, 576, dtype=torch.float64)
    table = torch.tensor([[5, 2, 7], [1, 0, -1]], dtype=torch.int32)
    lengths, starts = torch.tensor([9, 3]), torch.tensor([0, 2, 3])
    q = torch.randn(3, 2, 576, dtype=torch.float64)
    out, lse = mla_decode_reference(q, cache, table, lengths, 0.05, query_starts=starts)
    first = torch.cat([cache[5], cache[2], cache[7]])[:9]
    for row, (tokens, visible) in enumerate(((first, 8), (first, 9), (cache[1], 3))):
        for head in range(2):
            expected, expected_lse = by_hand(q[row, head], tokens, visible, 0.05)
            torch.testing.assert_close(out[row, head], expected)
            assert math.isclose(lse[row, head].item(), expected_lse, rel_tol=1e-12)


def test_rows_that_see_nothing_are_zero() -> None:
    q, cache = torch.randn(4, 1, 576), torch.randn(2, 4, 576)
    table, lengths = torch.tensor([[1], [-1]], dtype=torch.int32), torch.tensor([1, 0])
    out, lse = mla_decode_reference(q, cache, table, lengths, 1.0)
    assert (out[[0, 2, 3]] == 0).all()
    assert (lse[[0, 2, 3]] == -torch.inf).all()
    torch.testing.assert_close(out[1, 0], cache[1, 0, :512].double(), check_dtype=False)


def test_a_bf16_run_is_near_and_not_equal() -> None:
    torch.manual_seed(1)
    q, cache = torch.randn(2, 4, 576).bfloat16(), torch.randn(4, 64, 576).bfloat16()
    table, lengths = torch.arange(4, dtype=torch.int32).view(2, 2), torch.tensor([128, 77])
    truth, _ = mla_decode_reference(q, cache, table, lengths, 576**-0.5)
    rounded, _ = mla_decode_reference(q, cache, table, lengths, 576**-0.5, dtype=torch.bfloat16)
    error = ((rounded.double() - truth).norm() / truth.norm()).item()
    assert 1e-4 < error < 1e-2


def test_scales_belong_to_queries_and_latents() -> None:
    torch.manual_seed(2)
    q, cache = torch.randn(2, 4, 576).to(torch.float8_e4m3fn), torch.randn(2, 64, 576).to(torch.float8_e4m3fn)
    table, lengths = torch.tensor([[1], [0]], dtype=torch.int32), torch.tensor([64, 5])
    scales = torch.tensor([0.25]), torch.tensor([3.0])
    plain = mla_decode_reference(q.double() * 0.25, cache.double() * 3.0, table, lengths, 576**-0.5)
    scaled = mla_decode_reference(q, cache, table, lengths, 576**-0.5, query_scale=scales[0], kv_scale=scales[1])
    assert torch.equal(plain[0], scaled[0])
    assert torch.equal(plain[1], scaled[1])
