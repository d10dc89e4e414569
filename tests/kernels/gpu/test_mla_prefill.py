# SPDX-License-Identifier: Apache-2.0
"""MLA prefill on a cached prefix on Hopper, with vLLM's FlashAttention 3, against the float64 reference on poisoned memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from cached_prefill_case import BATCHES, make_case

from tokenspeed_plugin.kernels.engine.prefill_steps import attend
from tokenspeed_plugin.kernels.mla.cached_prefill import packing, prefill
from tokenspeed_plugin.kernels.mla.cached_prefill.groups import workspace_bytes

LONG = {
    "a chunk": ([256], [9000]),
    "ragged": ([300, 1, 130, 700], [4000, 513, 130, 2900]),
    "empty requests": ([0, 257, 0, 64, 0], [0, 5000, 90, 64, 0]),
    "longer than a product": ([64], [prefill.UNFOLD_TOKENS + 1700]),
}


@pytest.mark.parametrize("page_tokens", [16, 64, 128])
@pytest.mark.parametrize("name", BATCHES)
def test_short_batches_agree_with_the_reference(name: str, page_tokens: int) -> None:
    case = make_case(*BATCHES[name], heads=8, page_tokens=page_tokens, device="cuda")
    out, _ = case.run(attend)
    case.check(out)


@pytest.mark.parametrize("name", LONG)
def test_long_batches_agree_with_the_reference(name: str) -> None:
    case = make_case(*LONG[name], heads=16, page_tokens=64, device="cuda")
    out, _ = case.run(attend)
    case.check(out)


@pytest.mark.parametrize("heads", [1, 5, 128])
def test_head_counts_and_small_workspaces(heads: int) -> None:
    case = make_case(*BATCHES["ragged"], heads=heads, page_tokens=64, device="cuda")
    out, groups = case.run(attend, workspace_bytes(170, min(heads, 3)))
    assert groups > 1
    case.check(out)


@pytest.mark.parametrize("page_tokens", [1, 16, 64, 128])
def test_slots_and_gathered_tokens_are_those_of_torch(page_tokens: int) -> None:
    case = make_case(*LONG["ragged"], heads=3, page_tokens=page_tokens, device="cuda")
    starts = torch.tensor([0, *itertools.accumulate(case.kv_lens)], dtype=torch.int32, device="cuda")
    arguments = (case.table, starts, sum(case.kv_lens), max(case.kv_lens), page_tokens)
    slots = packing.token_slots(*arguments)
    assert torch.equal(slots, packing.token_slots_torch(*arguments))
    results = []
    for gather in (packing.gather, packing.gather_torch):
        latents = torch.empty(len(slots), 512, dtype=torch.bfloat16, device="cuda")
        keys = torch.zeros(3, len(slots), 192, dtype=torch.bfloat16, device="cuda")
        gather(case.cache, slots, latents, keys.transpose(0, 1))
        results.append((latents, keys))
    assert all(torch.equal(ours, torchs) for ours, torchs in zip(*results, strict=True))
