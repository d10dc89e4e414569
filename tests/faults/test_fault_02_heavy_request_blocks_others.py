# SPDX-License-Identifier: Apache-2.0
"""Fault 2 (vllm #31731): one heavy request that lacks memory stops the scan, so light ones wait behind it."""

from __future__ import annotations

import pytest
from exact.relaxed import relaxed
from exact.timeline import Timeline
from hypothesis import given
from hypothesis import strategies as st
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix

ADMISSION_BOUND_TICKS = 200


def make_run(scheduler: str) -> Timeline:
    run = Timeline(scheduler, Knobs(groups=(Group(4),), num_blocks=10, budget_tokens=64, max_model_len=64))
    run.submit("r0", 21, 60)
    run.ticks(2)
    return run


def test_light_requests_run_beside_a_heavy_one_that_waits(scheduler: str) -> None:
    run = make_run(scheduler)
    run.submit("r1", 36, 4)
    run.submit("r2", 4, 2)
    run.submit("r3", 4, 2)
    run.ticks(6)
    assert run.outcome("r2") == run.outcome("r3") == "length"
    assert run.outcome("r1") is None
    run.finish()


def test_a_stream_of_light_requests_does_not_starve_the_heavy_one(scheduler: str) -> None:
    run = make_run(scheduler)
    run.submit("heavy", 36, 4)
    for number in range(ADMISSION_BOUND_TICKS):
        run.submit(f"light{number}", 4, 2)
        run.tick()
    assert "heavy" in run.first_token, "not admitted while light requests kept coming"
    run.finish(4_000)


@relaxed
@given(queue=st.lists(st.integers(1, 4) | st.integers(30, 36), min_size=1, max_size=8), depth=st.integers(1, 2))
def test_whatever_fits_runs_past_whatever_does_not(scheduler: str, queue: list[int], depth: int) -> None:
    """The holder leaves 4 of 10 blocks: prompts from 30 tokens never fit beside it, those up to 4 always do in turn."""
    knobs = Knobs(groups=(Group(4),), num_blocks=10, budget_tokens=64, max_model_len=64, pipeline_depth=depth)
    run = Timeline(scheduler, knobs)
    run.submit("holder", 21, 40)
    run.ticks(2)
    for number, prompt in enumerate(queue):
        run.submit(f"r{number}", prompt, 1)
    run.ticks(2 * len(queue) + depth)
    light = [number for number, prompt in enumerate(queue) if prompt <= 4]
    assert [run.outcome(f"r{number}") for number in light] == ["length"] * len(light)
    run.finish()
