# SPDX-License-Identifier: Apache-2.0
"""Real models with large blocks: prompts that share part of a block reuse it, and say the same as without the cache."""

import pytest

from real_vllm.mixed_traffic import mixed_requests
from real_vllm.models import FIRST_TEXT_ID, VOCABULARY_TOKENS, tiny_model
from real_vllm.runner import run_scenario
from real_vllm.scenario import Outcome, PromptRequest, Scenario

pytestmark = pytest.mark.real_vllm

TOKENSPEED = "tokenspeed_plugin.scheduler_fsm.TokenSpeedScheduler"


def words(seed: int, count: int) -> tuple[int, ...]:
    return tuple(
        FIRST_TEXT_ID + (seed * 7919 + i * 104_729) % (VOCABULARY_TOKENS - FIRST_TEXT_ID) for i in range(count)
    )


def forks(shared_tokens: int, gap_steps: int) -> tuple[PromptRequest, ...]:
    """Five prompts with a common beginning; the last but one repeats the first."""
    endings = [words(10 + number, 60) for number in (0, 1, 2, 0, 3)]
    return tuple(
        PromptRequest(words(1, shared_tokens) + ending, 12, arrival_step=gap_steps * number)
        for number, ending in enumerate(endings)
    )


def run(model: str, requests: tuple[PromptRequest, ...], block_size: int, *, ours: bool, caching: bool) -> Outcome:
    arguments = {
        "block_size": block_size,
        "max_model_len": 2112,
        "max_num_batched_tokens": 2112,
        "enable_prefix_caching": caching,
        "kv_cache_memory_bytes": 256 << 20,
    }
    return run_scenario(Scenario(tiny_model(model), requests, TOKENSPEED if ours else None, arguments))


@pytest.mark.parametrize(("block_size", "shared_tokens", "reused_tokens"), [(512, 700, 640), (1536, 1000, 896)])
def test_part_of_a_block_is_reused(block_size: int, shared_tokens: int, reused_tokens: int) -> None:
    """One after the other, so that every fork finds what the first computed; copies and writing on give the same tokens."""
    requests = forks(shared_tokens, gap_steps=14)
    expected = run("qwen3", requests, block_size, ours=False, caching=False)
    cached = run("qwen3", requests, block_size, ours=True, caching=True)
    assert cached.token_ids == expected.token_ids
    assert len(set(expected.token_ids)) == 4
    repeated = (shared_tokens + 60 - 1) // 128 * 128
    assert cached.num_cached_tokens == 3 * reused_tokens + repeated


@pytest.mark.parametrize("model", ["gpt_oss"])
def test_mixed_traffic_with_large_blocks(model: str) -> None:
    """Side by side, with windows: tokens equal those of vLLM's scheduler, and more of them come from the cache."""
    requests = mixed_requests(24, 5, VOCABULARY_TOKENS, max_prompt_tokens=900, max_new_tokens=24)
    stock = run(model, requests, 512, ours=False, caching=True)
    ours = run(model, requests, 512, ours=True, caching=True)
    for index, request in enumerate(requests):
        left, right = stock.token_ids[index], ours.token_ids[index]
        if request.abort_after_tokens is not None:
            left, right = left[: min(len(left), len(right))], right[: min(len(left), len(right))]
        assert left == right
    assert ours.num_cached_tokens > stock.num_cached_tokens
