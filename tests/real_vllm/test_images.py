# SPDX-License-Identifier: Apache-2.0
"""A real multimodal model: images shared by several requests give the same greedy tokens whoever schedules them."""

import random
from typing import Any

import pytest

from real_vllm.image_model import IMAGE_TOKEN_ID, IMAGE_TOKENS, llava_model
from real_vllm.models import VOCABULARY_TOKENS
from real_vllm.runner import run_scenario
from real_vllm.scenario import Outcome, PromptRequest, Scenario

pytestmark = pytest.mark.real_vllm

TOKENSPEED = "tokenspeed_plugin.scheduler_fsm.TokenSpeedScheduler"
NUM_IMAGES = 4


def requests() -> tuple[PromptRequest, ...]:
    """Words around one to three of a few images; some prompts come twice, some clients leave."""
    draw = random.Random(5)
    made: list[PromptRequest] = []
    for index in range(24):
        if made and draw.random() < 0.25:
            earlier = draw.choice(made)
            made.append(PromptRequest(earlier.prompt_token_ids, 12, arrival_step=index, images=earlier.images))
            continue
        words: list[int] = [draw.randrange(3, VOCABULARY_TOKENS) for _ in range(draw.randint(1, 40))]
        images = tuple(draw.randrange(NUM_IMAGES) for _ in range(draw.randint(1, 3)))
        for _ in images:
            words += [IMAGE_TOKEN_ID, *(draw.randrange(3, VOCABULARY_TOKENS) for _ in range(draw.randint(1, 20)))]
        leaves = 3 if draw.random() < 0.15 else None
        made.append(PromptRequest(tuple(words), 16, arrival_step=index // 2, abort_after_tokens=leaves, images=images))
    return tuple(made)


REQUESTS = requests()


def run(scheduler: str | None, **arguments: Any) -> Outcome:
    settings = {"block_size": 32, "max_num_seqs": 8, "max_model_len": 256, "max_num_batched_tokens": 512, **arguments}
    return run_scenario(Scenario(llava_model(), REQUESTS, scheduler, settings))


def differences(expected: Outcome, actual: Outcome) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Requests whose tokens differ; one whose client leaves is held to the common prefix alone."""
    differing = {}
    pairs = zip(REQUESTS, expected.token_ids, actual.token_ids, strict=True)
    for index, (request, left, right) in enumerate(pairs):
        common = min(len(left), len(right)) if request.abort_after_tokens is not None else None
        if left[:common] != right[:common]:
            differing[index] = (left, right)
    return differing


@pytest.fixture(scope="module")
def stock() -> Outcome:
    return run(None)


def test_the_traffic_proves_something(stock: Outcome) -> None:
    """The image matters: the same words with other images give other answers; prefixes are found; the budget is vLLM's."""
    assert stock.scheduler_name.startswith("vllm.")
    assert stock.num_cached_tokens > 0
    assert stock.encoder_limits == (512, 512)
    other = tuple(
        PromptRequest(request.prompt_token_ids, request.max_tokens, images=tuple(i + 50 for i in request.images))
        for request in REQUESTS[:4]
    )
    answers = run_scenario(Scenario(llava_model(), other, None, {"block_size": 32, "max_model_len": 256})).token_ids
    assert all(a[:3] != b[:3] for a, b in zip(answers, stock.token_ids, strict=False) if a and b)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_num_batched_tokens": 32},
        {"max_num_batched_tokens": 48, "num_gpu_blocks_override": 14},
        {"max_num_batched_tokens": 32, "disable_chunked_mm_input": True, "num_gpu_blocks_override": 14},
    ],
    ids=["roomy", "small steps", "preemption", "whole images"],
)
def test_images_give_the_tokens_of_the_stock_scheduler(stock: Outcome, arguments: dict[str, Any]) -> None:
    ours = run(TOKENSPEED, **arguments)
    assert ours.scheduler_name.startswith("tokenspeed_plugin.")
    assert differences(stock, ours) == {}
    assert ours.num_cached_tokens > 0
    num_batched = arguments.get("max_num_batched_tokens", 512)
    assert ours.encoder_limits == (num_batched, num_batched)
    assert num_batched > IMAGE_TOKENS
    assert (ours.num_preemptions > 0) == ("num_gpu_blocks_override" in arguments)
