# SPDX-License-Identifier: Apache-2.0
"""Prompts: random token ids, a pure function of the round and the request."""

from __future__ import annotations

from benchmarks.control.tokens import mixed_hash, stream_tokens
from benchmarks.gpu.models import VOCABULARY_TOKENS

_FIRST_TOKEN = 300  # past special tokens and single bytes


def random_prompt(stream: int, num_tokens: int) -> list[int]:
    """Return `num_tokens` token ids of `stream`, none of them special."""
    span = VOCABULARY_TOKENS - _FIRST_TOKEN
    return [token % span + _FIRST_TOKEN for token in stream_tokens(stream, 0, num_tokens)]


def batch_of_prompts(round_number: int, num_requests: int, num_tokens: int) -> list[list[int]]:
    """Return prompts that no other round or batch size uses, so that no round hits another's cache."""
    base = mixed_hash(round_number, num_requests) % (1 << 24)
    return [random_prompt((base << 10) + index & 0xFFFFFFFF, num_tokens) for index in range(num_requests)]


def mixed_prompts(num_requests: int, max_tokens: int) -> list[list[int]]:
    """Return prompts of many lengths, a quarter of them behind one of four shared prefixes."""
    prompts = []
    for index in range(num_requests):
        length = 16 + mixed_hash(7, index) % (max_tokens - 16)
        shared = random_prompt(index % 16 // 4, max_tokens // 2) if index % 4 == 0 else []
        prompts.append((shared + random_prompt(100_000 + index, length))[:max_tokens])
    return prompts
