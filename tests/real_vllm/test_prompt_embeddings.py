# SPDX-License-Identifier: Apache-2.0
"""Prompts given as embeddings: ours against the stock scheduler, with prefixes shared and with prefixes that only look alike."""

import dataclasses

import pytest

from real_vllm.mixed_traffic import mixed_requests
from real_vllm.models import VOCABULARY_TOKENS, tiny_model
from real_vllm.runner import ScenarioError, run_scenarios
from real_vllm.scenario import Outcome, PromptRequest, Scenario

pytestmark = pytest.mark.real_vllm

TOKENSPEED = "tokenspeed_plugin.scheduler_fsm.TokenSpeedScheduler"
SETTINGS = {
    "block_size": 32,
    "max_num_seqs": 6,
    "max_model_len": 512,
    "async_scheduling": False,
    "enable_prompt_embeds": True,
    "num_gpu_blocks_override": 200,
    "max_num_batched_tokens": 96,
}


def traffic() -> tuple[PromptRequest, ...]:
    """Every prompt as token ids, and as embeddings of two tables: same ids and lengths, other content."""
    requests = mixed_requests(6, 31, VOCABULARY_TOKENS, max_prompt_tokens=300, max_new_tokens=12)
    plain = [dataclasses.replace(request, abort_after_tokens=None, arrival_step=0) for request in requests]
    waves = [(None, 0), (1, 40), (2, 80), (1, 120)]
    return tuple(
        dataclasses.replace(request, embedding_seed=seed, arrival_step=step)
        for seed, step in waves
        for request in plain
    )


REQUESTS = traffic()


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """Of the stock scheduler and of ours."""
    scenarios = [Scenario(tiny_model("qwen3"), REQUESTS, scheduler, SETTINGS) for scheduler in (None, TOKENSPEED)]
    results = run_scenarios(scenarios)
    for result in results:
        if isinstance(result, ScenarioError):
            raise result
    return [result for result in results if isinstance(result, Outcome)]


def test_tokens_are_those_of_the_stock_scheduler(outcomes: list[Outcome]) -> None:
    stock, ours = outcomes
    assert ours.token_ids == stock.token_ids
    assert ours.finish_reasons == stock.finish_reasons


def test_embeddings_are_told_apart_and_found_again(outcomes: list[Outcome]) -> None:
    """The ids of such tokens are all alike: without the embeddings in the keys, each prompt would hit on every other."""
    stock, ours = outcomes
    first, second, again = (ours.token_ids[6 * wave : 6 * wave + 6] for wave in (1, 2, 3))
    assert first == again
    assert sum(left != right for left, right in zip(first, second, strict=True)) > 3
    assert ours.num_cached_tokens >= stock.num_cached_tokens > 0
