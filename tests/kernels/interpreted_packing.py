# SPDX-License-Identifier: Apache-2.0
"""Runs the Triton kernels of the cached prefill under Triton's interpreter; started by test_cached_prefill.py."""

from __future__ import annotations

import itertools

import torch
from cached_prefill_case import BATCHES, make_case

from tokenspeed_plugin.kernels.mla.cached_prefill import packing


def check(name: str, page_tokens: int, by_head: bool) -> None:
    """Compare both kernels with torch, on poisoned pages and outputs."""
    case = make_case(*BATCHES[name], page_tokens=page_tokens)
    lengths = [kv if q else 0 for q, kv in zip(case.query_lens, case.kv_lens, strict=True)]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    arguments = (case.table, starts, sum(lengths), max(lengths), page_tokens)
    slots, expected = packing.token_slots(*arguments), packing.token_slots_torch(*arguments)
    assert torch.equal(slots, expected), name
    results = []
    for gather in (packing.gather, packing.gather_torch):
        latents = torch.full((len(slots), 512), torch.nan, dtype=torch.bfloat16)
        keys = torch.full((3, len(slots), 192) if by_head else (len(slots), 3, 192), -1.0, dtype=torch.bfloat16)
        gather(case.cache, slots, latents, keys.transpose(0, 1) if by_head else keys)
        assert not latents.isnan().any()
        assert (keys[..., :128] == -1).all()
        results.append((latents, keys))
    assert all(torch.equal(ours, torchs) for ours, torchs in zip(*results, strict=True)), name


def main() -> None:
    """Run all cases."""
    cases = list(itertools.product(("ragged", "empty requests"), (1, 16, 64)))
    for index, (name, page_tokens) in enumerate(cases):
        check(name, page_tokens, index % 2 == 0)
    print(f"{len(cases)} cases agree with torch")


if __name__ == "__main__":
    main()
