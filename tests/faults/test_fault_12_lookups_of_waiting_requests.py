# SPDX-License-Identifier: Apache-2.0
"""Fault 12 (ATOM PR 2305): while the pool is full, every waiting prompt is looked up again in every step."""

from __future__ import annotations

import pytest
from exact.relaxed import relaxed
from exact.timeline import Timeline
from hypothesis import given
from hypothesis import strategies as st
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix
NUM_WAITING = 50


def test_one_lookup_per_request_while_nothing_changes(scheduler: str) -> None:
    knobs = Knobs(groups=(Group(16),), num_blocks=640, budget_tokens=16_384, max_num_seqs=64, max_model_len=16_384)
    run = Timeline(scheduler, knobs)
    run.submit("holder", 9_000, 200)
    run.ticks(2)
    before = run.scheduler._core.counters()["cache_lookups"]
    for number in range(NUM_WAITING):
        run.submit(f"w{number}", 10_000, 1)
    run.ticks(100)
    assert run.outcome("holder") is None, "the holder keeps the memory for all 100 ticks"
    lookups = run.scheduler._core.counters()["cache_lookups"] - before
    assert 0 < lookups <= NUM_WAITING


@relaxed
@given(prompts=st.lists(st.integers(330, 360), min_size=1, max_size=30), num_ticks=st.integers(20, 80))
def test_no_lookup_without_a_change(scheduler: str, prompts: list[int], num_ticks: int) -> None:
    """The holder grows into free blocks, which helps nobody: each waiting prompt is looked up once, ever."""
    knobs = Knobs(groups=(Group(4),), num_blocks=110, budget_tokens=512, max_num_seqs=64, max_model_len=512)
    run = Timeline(scheduler, knobs)
    run.submit("holder", 200, 100)
    run.ticks(2)
    before = run.scheduler._core.counters()["cache_lookups"]
    for number, prompt in enumerate(prompts):
        run.submit(f"w{number}", prompt, 1)
    run.ticks(num_ticks)
    assert run.scheduler._core.counters()["cache_lookups"] - before <= len(prompts)
    run.finish()
