# SPDX-License-Identifier: Apache-2.0
"""Fault 30 (OpenVINO GenAI 3722): two prompts whose hashes collide share a block.

The index is the place where a hash that is too short would do harm: tests/cpp/kv_flat/prefix_index_test.cpp injects keys that agree in all
bits that choose a slot. Here whole prompts are probed that agree in everything but one token.
"""

from __future__ import annotations

import itertools
import random

import pytest

from tokenspeed_plugin.scheduler_fsm import _core

BLOCK_TOKENS = 4


def replay() -> _core.KvReplay:
    config = _core.KvConfig()
    config.num_blocks = 65
    config.key_tokens = BLOCK_TOKENS
    config.groups = [_core.GroupSpec(name="full", block_tokens=BLOCK_TOKENS, retention=_core.Retention.FULL)]
    return _core.KvReplay(config=config)


def prompt(tokens: list[int], **context: object) -> _core.PreparedPrompt:
    return _core.prepare_prompt(tokens=tokens, key_tokens=BLOCK_TOKENS, **context)


@pytest.mark.parametrize("changed", range(16))
def test_one_other_token_is_a_miss_from_its_block_on(changed: int) -> None:
    cache = replay()
    tokens = list(range(100, 116))
    cache.serve(prompt(tokens), _core.Departure())
    tokens[changed] += 1
    assert cache.probe(prompt(tokens)) == changed // BLOCK_TOKENS * BLOCK_TOKENS


def test_contexts_that_read_alike_when_joined_are_different() -> None:
    """Length framing: no two contexts have one encoding."""
    draw = random.Random(5)
    pieces = ["", "a", "b", "ab", "a\0b", "\0", "ba"]
    seen: dict[bytes, tuple[object, ...]] = {}
    for salt, adapter, content in itertools.product(pieces, pieces, pieces):
        begin = draw.randrange(0, 4)
        context = (salt, adapter, content, begin)
        (key,) = prompt([1, 2, 3, 4], salt=salt, adapter=adapter, content_spans=[(begin, begin + 1, content)]).keys
        assert seen.setdefault(key, context) == context
    assert len(seen) == len(pieces) ** 3


def test_equal_tails_behind_different_heads_share_nothing() -> None:
    cache = replay()
    tail = list(range(50, 62))
    cache.serve(prompt([1, 2, 3, 4, *tail]), _core.Departure())
    assert cache.probe(prompt([4, 3, 2, 1, *tail])) == 0
    assert cache.probe(prompt(tail)) == 0
