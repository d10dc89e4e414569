# SPDX-License-Identifier: Apache-2.0
"""Sessions with streaming input on a real model: the same greedy tokens as under vLLM's scheduler, with room or without."""

from __future__ import annotations

import random

import pytest

from real_vllm.models import VOCABULARY_TOKENS, tiny_model
from real_vllm.runner import run_scenario
from real_vllm.scenario import InputChunk, Outcome, PromptRequest, Scenario

pytestmark = pytest.mark.real_vllm

TOKENSPEED = "tokenspeed_plugin.scheduler_fsm.TokenSpeedScheduler"
MAX_TOKENS = 8


def tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(3, VOCABULARY_TOKENS) for _ in range(count))


def traffic() -> tuple[PromptRequest, ...]:
    """Sessions whose input comes while a turn runs, all at once, and long after it, beside ordinary requests."""
    draw = random.Random(5)
    sessions = [
        PromptRequest(
            tokens(draw, draw.randint(20, 90)),
            MAX_TOKENS,
            arrival_step=index,
            chunks=tuple(InputChunk(step + index, tokens(draw, draw.randint(5, 60)), MAX_TOKENS) for step in steps),
        )
        for index, steps in enumerate([(3, 5, 40), (1, 1, 2), (30, 60, 61), (12, 13, 50)])
    ]
    others = [PromptRequest(tokens(draw, draw.randint(40, 200)), 20, arrival_step=4 * index) for index in range(12)]
    return (*sessions, *others)


def run(scheduler_cls: str | None, **arguments: int) -> Outcome:
    sizes = {"block_size": 32, "max_num_seqs": 8, "max_model_len": 512, "max_num_batched_tokens": 256} | arguments
    return run_scenario(Scenario(tiny_model("qwen3"), traffic(), scheduler_cls, sizes))


def test_turns_are_answered_as_under_vllm() -> None:
    expected = run(None)
    assert {len(answer) for answer in expected.token_ids[:4]} == {4 * MAX_TOKENS}
    roomy = run(TOKENSPEED)
    assert roomy.scheduler_name.endswith("TokenSpeedScheduler")
    assert roomy.token_ids == expected.token_ids
    assert roomy.finish_reasons == expected.finish_reasons
    tight = run(TOKENSPEED, num_gpu_blocks_override=18)
    assert tight.num_preemptions > 0
    assert tight.token_ids == expected.token_ids
