# SPDX-License-Identifier: Apache-2.0
"""A real model with states (GDN) beside attention: the same tokens with and without the cache, and as vLLM's scheduler gives.

One request at a time: next to others, vLLM's own scheduler already gives other tokens for this model.
"""

import pytest

from real_vllm.models import FIRST_TEXT_ID, VOCABULARY_TOKENS, tiny_model
from real_vllm.runner import run_scenario
from real_vllm.scenario import Outcome, PromptRequest, Scenario

pytestmark = pytest.mark.real_vllm

TOKENSPEED = "tokenspeed_plugin.scheduler_fsm.TokenSpeedScheduler"


def words(seed: int, count: int) -> tuple[int, ...]:
    return tuple(
        FIRST_TEXT_ID + (seed * 7919 + i * 104_729) % (VOCABULARY_TOKENS - FIRST_TEXT_ID) for i in range(count)
    )


def forks() -> tuple[PromptRequest, ...]:
    """Four prompts that share 500 tokens, and the first again."""
    endings = [words(10 + number, 70) for number in (0, 1, 2, 3, 0)]
    return tuple(
        PromptRequest(words(1, 500) + ending, 10, arrival_step=16 * number) for number, ending in enumerate(endings)
    )


def run(*, ours: bool, caching: bool, block_size: int) -> Outcome:
    arguments = {
        "dtype": "bfloat16",
        "load_format": "dummy",
        "block_size": block_size,
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "enable_prefix_caching": caching,
    }
    scheduler = TOKENSPEED if ours else None
    return run_scenario(Scenario(tiny_model("qwen3_next"), forks(), scheduler, arguments, ("vary_dummy_weights",)))


@pytest.fixture(scope="module")
def expected() -> Outcome:
    """What vLLM's own scheduler says without a cache."""
    outcome = run(ours=False, caching=False, block_size=128)
    assert len(set(outcome.token_ids)) == 4
    return outcome


@pytest.mark.parametrize("block_size", [128, 512])
def test_tokens_do_not_depend_on_the_cache(expected: Outcome, block_size: int) -> None:
    """From the third fork on the states behind the common part are there; the last prompt starts from those at its end."""
    cached = run(ours=True, caching=True, block_size=block_size)
    assert cached.token_ids == expected.token_ids
    assert cached.num_cached_tokens == 384 + 384 + 512


def test_without_a_cache_the_states_stay_in_one_block(expected: Outcome) -> None:
    outcome = run(ours=True, caching=False, block_size=128)
    assert outcome.token_ids == expected.token_ids
    assert outcome.num_cached_tokens == 0
