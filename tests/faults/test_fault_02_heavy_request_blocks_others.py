# SPDX-License-Identifier: Apache-2.0
"""Fault 2 (vllm #31731): one heavy request that lacks memory stops the scan, so light ones wait behind it."""

from __future__ import annotations

import pytest
from exact.timeline import Timeline
from scheduler_harness import Group, Knobs

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
