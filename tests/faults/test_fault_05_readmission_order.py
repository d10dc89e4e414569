# SPDX-License-Identifier: Apache-2.0
"""Fault 5 (vllm #41951): victims and re-admission follow different orders, so a preempted request is overtaken."""

from __future__ import annotations

import pytest
from exact.timeline import Timeline
from scheduler_harness import Group, Knobs

pytestmark = pytest.mark.host_matrix


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_preemptions_per_request_are_bounded(scheduler: str, policy: str) -> None:
    """Equal priority, a pool that holds little more than one request: nobody is preempted over and over."""
    knobs = Knobs(groups=(Group(4),), num_blocks=9, budget_tokens=64, policy=policy, max_model_len=64)
    run = Timeline(scheduler, knobs)
    names = [f"r{number}" for number in range(6)]
    for name in names:
        run.submit(name, 9, 20)
        run.tick()
    run.finish()
    assert max(run.preempted.get(name, 0) for name in names) <= 2
    assert [run.outcome(name) for name in names] == ["length"] * 6


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_first_come_is_first_done_when_all_are_equal(scheduler: str, policy: str) -> None:
    """Victim choice and re-admission share one key: the earlier of two equal requests always ends first."""
    knobs = Knobs(groups=(Group(4),), num_blocks=9, budget_tokens=64, policy=policy, max_model_len=64)
    run = Timeline(scheduler, knobs)
    for name in ("a", "b", "c"):
        run.submit(name, 9, 20)
    run.finish()
    assert run.end["a"] < run.end["b"] < run.end["c"]
    assert run.preempted.get("a", 0) == 0
