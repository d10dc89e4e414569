# SPDX-License-Identifier: Apache-2.0
"""Fault 23 (vllm #48401): prefix caching is on, the block is longer than any request, and nothing ever says so."""

from __future__ import annotations

import pytest
from exact.timeline import Timeline
from exact.workload import words
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix


def knobs_of(block_tokens: int) -> Knobs:
    groups = (Group(block_tokens, keeps_state=True), Group(block_tokens))
    return Knobs(groups, 16, budget_tokens=4096, max_model_len=4096)


def test_a_block_of_8320_tokens_hits_in_a_context_of_4096(start_log: pytest.LogCaptureFixture) -> None:
    run = Timeline("tokenspeed", knobs_of(8320))
    for number in range(3):
        run.submit(f"r{number}", words(1, 3000) + words(10 + number, 40), 2)
        run.finish(40)
    assert run.cached["r2"] == 3000 // 128 * 128
    assert "prefixes are reused from 128 tokens on" in start_log.text
    assert "room for 8 requests of 4096 tokens or at most 8 short ones" in start_log.text


def test_what_can_never_hit_is_said(start_log: pytest.LogCaptureFixture) -> None:
    """A prime number of tokens has no divisor to match by."""
    Timeline("tokenspeed", knobs_of(8329))
    assert "the smallest reusable prefix has 8329 tokens, a request at most 4096" in start_log.text
