# SPDX-License-Identifier: Apache-2.0
"""Fault 26 (vllm #55196): a state makes every page as large as itself, and an fp8 cache gains nothing without saying why.

vLLM lays out the memory, one size of page for all, so a short request holds as many bytes with either dtype. What lies here: with fp8 a
block of attention holds twice the tokens, so long requests must gain, and the start must say what pins the page and who gains nothing.
"""

from __future__ import annotations

import re

import pytest
import torch
from exact.timeline import Timeline
from scheduler_knobs import Knobs
from vllm_pages import HEAD_BYTES, attention, planned, state

pytestmark = pytest.mark.host_matrix

STATE_BYTES = 1_000_000
NUM_HEADS = 8
LONG_TOKENS = 16_384


def start(dtype: torch.dtype, max_model_len: int, num_states: int) -> Timeline:
    """A scheduler for layers of which every fourth is attention; its block grows to the state's page, as vLLM's platform has it."""
    token_bytes = NUM_HEADS * HEAD_BYTES * dtype.itemsize
    block_tokens = -(-STATE_BYTES // (16 * token_bytes)) * 16
    layers = {f"state{i}": state(block_tokens, STATE_BYTES, block_tokens * token_bytes) for i in range(num_states)}
    layers |= {f"attention{i}": attention(block_tokens, NUM_HEADS, dtype) for i in range(num_states // 3)}
    knobs = Knobs(budget_tokens=max_model_len, max_model_len=max_model_len, max_num_seqs=64)
    knobs, config = planned(layers, knobs, pool_bytes=3 << 30)
    return Timeline("tokenspeed", knobs, kv_cache_config=config, block_size=block_tokens, hash_block_size=block_tokens)


def room(log: pytest.LogCaptureFixture) -> tuple[int, int]:
    found = re.findall(r"room for (\d+) requests of \d+ tokens or at most (\d+) short ones", log.text)
    long, short = found[-1]
    return int(long), int(short)


def test_long_requests_gain_and_the_start_says_that_short_ones_do_not(start_log: pytest.LogCaptureFixture) -> None:
    start(torch.bfloat16, LONG_TOKENS, 9)
    bf16_long, bf16_short = room(start_log)
    start(torch.float8_e4m3fn, LONG_TOKENS, 9)
    fp8_long, fp8_short = room(start_log)
    assert fp8_long >= 1.7 * bf16_long, "6 blocks of states and 64 or 34 of attention"
    assert fp8_short == pytest.approx(bf16_short, rel=0.05)
    assert "3,047,424 bytes, set by the states of 'state0' (3,000,000 bytes)" in start_log.text
    assert "a block of attention has 496 tokens: with a smaller --kv-cache-dtype it has more of them" in start_log.text
    assert "never used: 1.6% of a block of 'state0'" in start_log.text


def test_as_many_requests_as_promised_run_at_a_time(start_log: pytest.LogCaptureFixture) -> None:
    num_promised = []
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        run = start(dtype, 4_096, 96)
        num_long, _ = room(start_log)
        num_promised.append(num_long)
        for number in range(num_long):
            run.submit(f"r{number}", 4_096 - 40, 39)
        run.ticks(num_long)
        assert run.scheduler.get_request_counts() == (num_long, 0)
        run.finish(60)
        assert not run.preempted
    assert num_promised == [4, 6]
