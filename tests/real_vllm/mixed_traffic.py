# SPDX-License-Identifier: Apache-2.0
"""A seeded mix of requests that makes a scheduler do everything it can: share, chunk, preempt, abort."""

import random

from real_vllm.models import FIRST_TEXT_ID
from real_vllm.scenario import PromptRequest

NUM_PREFIXES = 4
ARRIVALS_PER_STEP = 3
SHORT_PROMPT_TOKENS = 32


def mixed_requests(
    num_requests: int, seed: int, vocabulary_tokens: int, max_prompt_tokens: int, max_new_tokens: int
) -> tuple[PromptRequest, ...]:
    """A quarter short prompts, a quarter long ones, the rest on one of four long prefixes or repeats; one in six is aborted.

    Args:
        num_requests: how many.
        seed: of the random choices.
        vocabulary_tokens: token ids are drawn from ``FIRST_TEXT_ID`` up to this.
        max_prompt_tokens: longest prompt; prefixes take up to two thirds of it.
        max_new_tokens: longest answer.
    """
    draw = random.Random(seed)

    def text(num_tokens: int) -> tuple[int, ...]:
        return tuple(draw.randrange(FIRST_TEXT_ID, vocabulary_tokens) for _ in range(num_tokens))

    prefixes = [text(draw.randint(max_prompt_tokens // 3, max_prompt_tokens * 2 // 3)) for _ in range(NUM_PREFIXES)]
    requests: list[PromptRequest] = []
    for index in range(num_requests):
        if index % 8 == 7:
            prompt = requests[draw.randrange(index)].prompt_token_ids
        elif index % 2:
            prompt = draw.choice(prefixes) + text(draw.randint(1, max_prompt_tokens // 3))
        else:
            prompt = text(draw.randint(1, max_prompt_tokens if index % 4 else SHORT_PROMPT_TOKENS))
        max_tokens = draw.randint(1, max_new_tokens)
        abort_after = draw.randrange(max_tokens) if index % 6 == 5 else None
        requests.append(PromptRequest(prompt, max_tokens, index // ARRIVALS_PER_STEP, abort_after))
    return tuple(requests)
