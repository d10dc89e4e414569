# SPDX-License-Identifier: Apache-2.0
"""Token streams and prompts are pure functions, and the values are those that other programs compute."""

import numpy as np

from benchmarks.control.tokens import FIRST_TOKEN, VOCABULARY_TOKENS, mixed_hash, splitmix64, stream_tokens
from benchmarks.gpu.models import VOCABULARY_TOKENS as GPU_VOCABULARY_TOKENS
from benchmarks.gpu.workload import batch_of_prompts, mixed_prompts


def reference_splitmix64(state: int) -> int:
    """The published algorithm on Python's unbounded integers."""
    mask = (1 << 64) - 1
    mixed = (state + 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return mixed ^ (mixed >> 31)


def test_splitmix64_has_the_published_first_outputs_of_seed_zero():
    golden = 0x9E3779B97F4A7C15
    states = np.array([0, golden, (2 * golden) % 2**64], dtype=np.uint64)
    assert [hex(int(value)) for value in splitmix64(states)] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


def test_stream_token_is_the_documented_function_of_stream_and_position():
    expected = [reference_splitmix64((17 << 32) + p) % VOCABULARY_TOKENS + FIRST_TOKEN for p in range(100, 140)]
    assert stream_tokens(17, 100, 140) == expected


def test_slices_of_a_stream_join_and_streams_differ():
    assert stream_tokens(3, 0, 50) + stream_tokens(3, 50, 80) == stream_tokens(3, 0, 80)
    assert stream_tokens(3, 0, 50) != stream_tokens(4, 0, 50)


def test_mixed_hash_depends_on_every_key_and_on_their_order():
    values = {mixed_hash(1, 2), mixed_hash(2, 1), mixed_hash(1, 2, 0), mixed_hash(1, 3)}
    assert len(values) == 4
    assert mixed_hash(1) == reference_splitmix64(12345 ^ 1)


def test_gpu_prompts_repeat_and_rounds_share_no_prompt():
    first, again, other = (batch_of_prompts(round_number, 8, 32) for round_number in (1, 1, 2))
    assert first == again
    assert all(len(prompt) == 32 for prompt in first)
    assert not {tuple(prompt) for prompt in first} & {tuple(prompt) for prompt in other}
    assert len({tuple(prompt) for prompt in first}) == 8


def test_mixed_prompts_fit_and_some_share_a_prefix():
    prompts = mixed_prompts(64, 128)
    assert all(16 <= len(prompt) <= 128 for prompt in prompts)
    assert all(300 <= token < GPU_VOCABULARY_TOKENS for prompt in prompts for token in prompt)
    heads = [tuple(prompt[:64]) for prompt in prompts if len(prompt) > 64]
    assert len(set(heads)) < len(heads)
