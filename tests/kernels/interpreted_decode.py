# SPDX-License-Identifier: Apache-2.0
"""Runs the Triton tier under Triton's interpreter against the reference; started by test_triton_decode.py."""

from __future__ import annotations

import itertools

import torch

from tokenspeed_plugin.kernels.mla.reference import mla_decode_reference
from tokenspeed_plugin.kernels.mla.triton_decode import mla_decode_triton

LENGTHS, HEADS, QUERIES = (70, 0, 33), 8, 2


def check(page_tokens: int, counts: list[int] | None) -> None:
    """Compare on poisoned pages, with a token of padding where query counts differ."""
    torch.manual_seed(0)
    pages = -(-max(LENGTHS) // page_tokens)
    cache = torch.randn(3 * pages + 1, page_tokens, 576)
    cache[0] = float("nan")
    table = (torch.randperm(3 * pages) + 1).to(torch.int32).view(3, pages)
    for request, length in enumerate(LENGTHS):
        used = -(-length // page_tokens)
        if length % page_tokens:
            cache[table[request, used - 1], length % page_tokens :] = float("nan")
        table[request, used:] = -1
    starts = None if counts is None else torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
    q = torch.randn(3 * QUERIES if counts is None else sum(counts) + 1, HEADS, 576)
    seq_lens = torch.tensor(LENGTHS, dtype=torch.int32)
    out, lse = mla_decode_triton(
        q[..., :512],
        q[..., 512:],
        cache,
        table,
        seq_lens,
        0.05,
        max_query_tokens=QUERIES,
        query_starts=starts,
        num_splits=3,
    )
    clean, safe = torch.nan_to_num(cache), table.clamp(min=0)
    truth, truth_lse = mla_decode_reference(q, clean, safe, seq_lens, 0.05, query_starts=starts)
    torch.testing.assert_close(out.double(), truth, atol=2e-3, rtol=0)
    torch.testing.assert_close(lse.double(), truth_lse, atol=1e-3, rtol=0, check_dtype=False)


def main() -> None:
    """Run all cases."""
    cases = list(itertools.product((1, 16, 64), (None, [2, 0, 1])))
    for page_tokens, counts in cases:
        check(page_tokens, counts)
    print(f"{len(cases)} cases agree with the reference")


if __name__ == "__main__":
    main()
