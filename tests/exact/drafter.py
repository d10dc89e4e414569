# SPDX-License-Identifier: Apache-2.0
"""A pseudo-random drafter: each proposed token is the right one with a given probability."""

from __future__ import annotations

import random

from exact.reference import FIRST_TOKEN, chain, next_token
from exact.row import Row


class Drafter:
    """Proposes up to `num_tokens` tokens after the last sampled one.

    Args:
        seed: seed of its own random stream.
        right: probability that a proposed token is what the model would say.
        num_tokens: tokens per proposal; a synchronous n-gram drafter may find fewer.
    """

    def __init__(self, seed: int, right: float, num_tokens: int) -> None:
        self._random = random.Random(seed)
        self._right = right
        self._num_tokens = num_tokens

    def propose(self, row: Row, sampled: bool, full: bool, vocab: int) -> list[int]:
        """Drafts for the positions after `row.device_tokens[-1]`; noise after a chunk that sampled nothing."""
        draw = self._random
        count = self._num_tokens if full else draw.randint(0, self._num_tokens)
        if not sampled or not row.device_tokens:
            return [draw.randrange(FIRST_TOKEN, vocab) for _ in range(count)]
        position = len(row.values)
        value = chain(row.values[-1], position, row.device_tokens[-1])
        drafts = []
        for _ in range(count):
            token = next_token(value, row.forbidden(position), vocab)
            if draw.random() >= self._right:
                token = draw.randrange(FIRST_TOKEN, vocab)
            drafts.append(token)
            position += 1
            value = chain(value, position, token)
        return drafts
