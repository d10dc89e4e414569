# SPDX-License-Identifier: Apache-2.0
"""MLA prefill on a cached prefix on Hopper, with vLLM's FlashAttention 3, against the float64 reference on poisoned memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from cached_prefill_case import BATCHES, make_case

from tokenspeed_plugin.kernels.engine.prefill_steps import attend
from tokenspeed_plugin.kernels.mla.cached_prefill import making, packing
from tokenspeed_plugin.kernels.mla.cached_prefill.groups import workspace_bytes
from tokenspeed_plugin.kernels.mla.cached_prefill.making import PlanMaking, gather_and_products
from tokenspeed_plugin.kernels.mla.unfold.tiles import plan_tiles
from tokenspeed_plugin.kernels.mla.unfold.unfold import of_device, paged_unfold

WAYS = pytest.mark.parametrize("way", [gather_and_products, paged_unfold])
LONG = {
    "a chunk": ([256], [9000]),
    "ragged": ([300, 1, 130, 700], [4000, 513, 130, 2900]),
    "empty requests": ([0, 257, 0, 64, 0], [0, 5000, 90, 64, 0]),
    "longer than a product": ([64], [making.UNFOLD_TOKENS + 1700]),
}


@WAYS
@pytest.mark.parametrize("page_tokens", [16, 64, 128])
@pytest.mark.parametrize("name", BATCHES)
def test_short_batches_agree_with_the_reference(name: str, page_tokens: int, way: PlanMaking) -> None:
    case = make_case(*BATCHES[name], heads=8, page_tokens=page_tokens, device="cuda")
    out, _ = case.run(attend, plan_making=way)
    case.check(out)


@WAYS
@pytest.mark.parametrize("name", LONG)
def test_long_batches_agree_with_the_reference(name: str, way: PlanMaking) -> None:
    case = make_case(*LONG[name], heads=16, page_tokens=64, device="cuda")
    out, _ = case.run(attend, plan_making=way)
    case.check(out)


@WAYS
@pytest.mark.parametrize("heads", [1, 5, 128])
def test_head_counts_and_small_workspaces(heads: int, way: PlanMaking) -> None:
    case = make_case(*BATCHES["ragged"], heads=heads, page_tokens=64, device="cuda")
    out, groups = case.run(attend, workspace_bytes(170, min(heads, 3)), way)
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


@pytest.mark.parametrize("page_tokens", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("heads", [1, 3])
def test_keys_and_values_from_pages_stay_within_their_rows(heads: int, page_tokens: int) -> None:
    """Requests end within tiles, at their edges and within pages; all around what may be written is poison."""
    lengths = [1, 127, 128, 129, 700, 0, 9000]
    case = make_case([0] * len(lengths), lengths, heads=heads + 2, page_tokens=page_tokens, device="cuda")
    starts, device = [0, *itertools.accumulate(lengths)], torch.device("cuda", torch.cuda.current_device())
    tokens, guard, poison = starts[-1], 4096, -7.0
    memory = torch.full((2 * heads * tokens * 192 + 2 * guard,), poison, dtype=torch.bfloat16, device="cuda")
    rows = memory[guard:-guard].view(2 * heads, tokens, 192)
    weights = case.weights[1 : 1 + heads]
    launches, tiles = of_device(device), plan_tiles(starts).cuda()

    slots = packing.token_slots_torch(case.table, torch.tensor(starts, device="cuda"), tokens, 9000, page_tokens)
    flat = case.cache[slots // page_tokens, slots % page_tokens]
    expected = torch.matmul(flat[:, :512].double(), weights.reshape(2 * heads, 128, 512).double().transpose(1, 2))
    for rope in (False, True):
        rows[..., :128] = poison
        launches(case.cache, weights, case.table, tiles, page_tokens, rows, rope=rope)
        error = (rows[..., :128].double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < 4e-3  # bf16 rounds by up to one part in 512
        assert torch.equal(rows[::2, :, 128:], flat[:, 512:].expand(heads, -1, -1) if rope else rows[1::2, :, 128:])
        assert (rows[1::2, :, 128:] == poison).all()
        assert (memory[:guard] == poison).all()
        assert (memory[-guard:] == poison).all()


def test_replayed_graphs_and_head_groups_agree() -> None:
    """With more tiles than run at once, so that blocks take several, and all barriers begin anew with each launch."""
    case = make_case([64, 5], [40000, 11], heads=4, page_tokens=64, device="cuda")
    tokens, device = 40011, torch.device("cuda", torch.cuda.current_device())
    launches, tiles = of_device(device), plan_tiles([0, 40000, 40011]).cuda()
    together, alone = (torch.zeros(8, tokens, 192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches(case.cache, case.weights, case.table, tiles, 64, together, rope=True)
    for head in range(4):
        weights = case.weights[head : head + 1]
        launches(case.cache, weights, case.table, tiles, 64, alone[2 * head : 2 * head + 2], rope=True)
    for _ in range(3):
        together.zero_()
        graph.replay()
        assert torch.equal(together, alone)
