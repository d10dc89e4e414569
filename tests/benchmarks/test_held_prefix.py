# SPDX-License-Identifier: Apache-2.0
"""The connector that holds a prefix: which tokens it claims, and that every page is filled by layer and position alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.served.held_prefix import PERIOD_TOKENS, Fill, HeldPrefix, fill_pages, held_latents
from benchmarks.served.measurements import HELD

DIMS = 576
CPU = torch.device("cpu")


def connector(page_tokens: int) -> HeldPrefix:
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=page_tokens), kv_transfer_config=object())
    return HeldPrefix(config, None, None)


def request(num_tokens: int, *, held: bool = True) -> Any:
    params = {HELD: True} if held else None
    return SimpleNamespace(request_id="r", num_prompt_tokens=num_tokens, kv_transfer_params=params)


def step(num_tokens: int, pages: list[int]) -> Any:
    new = SimpleNamespace(req_id="r", prompt_token_ids=[5] * num_tokens, block_ids=(pages,))
    return SimpleNamespace(scheduled_new_reqs=[new])


@pytest.mark.parametrize(
    ("num_tokens", "local", "claimed"), [(100, 0, 96), (97, 0, 96), (96, 0, 80), (100, 32, 64), (100, 96, 0), (3, 0, 0)]
)
def test_it_claims_whole_pages_and_leaves_a_token_to_compute(num_tokens: int, local: int, claimed: int) -> None:
    assert connector(16).get_num_new_matched_tokens(request(num_tokens), local) == (claimed, False)
    assert connector(16).get_num_new_matched_tokens(request(num_tokens, held=False), local) == (0, False)


def test_a_step_fills_what_was_claimed_once() -> None:
    ours, asked, pages = connector(16), request(100), list(range(20, 27))
    ours.update_state_after_alloc(asked, None, 64)
    assert ours.build_connector_meta(step(100, pages)).fills == [Fill([22, 23, 24, 25], 32)]
    assert ours.build_connector_meta(step(100, pages)).fills == []
    ours.update_state_after_alloc(asked, None, 0)
    assert ours.build_connector_meta(step(100, pages)).fills == []


@pytest.mark.parametrize("has_head", [False, True])
def test_engines_with_other_pages_hold_the_same_context(has_head: bool) -> None:
    """Two page sizes, pages in any order: token by token the same, and other pages stay as they are."""
    num_tokens, contexts = PERIOD_TOKENS + 1000, []
    for page_tokens in (16, 64):
        num_pages = num_tokens // page_tokens
        pages = (torch.randperm(num_pages) + 1).tolist()
        shape = (num_pages + 2, 1, page_tokens, DIMS) if has_head else (num_pages + 2, page_tokens, DIMS)
        caches = {name: torch.zeros(shape, dtype=torch.bfloat16) for name in ("first", "second")}
        ours = connector(page_tokens)
        ours.register_kv_caches(caches)
        ours.update_state_after_alloc(request(num_tokens + 1), None, num_pages * page_tokens)
        ours.bind_connector_metadata(ours.build_connector_meta(step(num_tokens + 1, pages)))
        ours.start_load_kv(None)
        assert not any(cache[page].any() for cache in caches.values() for page in (0, -1))
        flat = [cache.view(-1, page_tokens, DIMS)[pages].flatten(0, 1) for cache in caches.values()]
        contexts.append(torch.stack(flat)[:, : num_tokens // 64 * 64])
    assert torch.equal(contexts[0], contexts[1])
    first, second = contexts[0]
    assert torch.equal(first[:900], first[PERIOD_TOKENS : PERIOD_TOKENS + 900])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, second)


def test_pages_are_filled_from_the_position_they_begin_with() -> None:
    latents, cache = held_latents(0, DIMS, torch.bfloat16, CPU), torch.zeros(4, 16, DIMS, dtype=torch.bfloat16)
    fill_pages(cache, Fill([3, 1], PERIOD_TOKENS - 8), latents)
    assert torch.equal(cache[3], torch.cat((latents[-8:], latents[:8])))
    assert torch.equal(cache[1], latents[8:24])
    assert latents[:, :512].float().std() == pytest.approx(1.0, abs=0.01)
    assert latents[:, 512:].float().std() == pytest.approx(2.0, abs=0.02)


def test_an_e4m3_cache_is_filled_with_the_bytes_of_the_same_latents() -> None:
    latents = held_latents(3, DIMS, torch.uint8, CPU)
    assert latents.dtype == torch.uint8
    same = held_latents(3, DIMS, torch.bfloat16, CPU).float()
    assert torch.allclose(latents.view(torch.float8_e4m3fn).float(), same, rtol=0.08, atol=1e-2)
