# SPDX-License-Identifier: Apache-2.0
"""Fault 5 (vllm #41951): victims and re-admission follow different orders, so a preempted request is overtaken."""

from __future__ import annotations

from dataclasses import replace

import pytest
from exact.relaxed import relaxed
from exact.timeline import Timeline
from hypothesis import given
from hypothesis import strategies as st
from scheduler_knobs import Group, Knobs

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


@relaxed
@given(
    shapes=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 24)), min_size=2, max_size=7),
    gaps=st.lists(st.integers(0, 3), min_size=7, max_size=7),
    policy=st.sampled_from(["fcfs", "priority"]),
    prefix_caching=st.booleans(),
    depth=st.integers(1, 2),
)
def test_each_preemption_is_paid_by_an_earlier_request(
    scheduler: str, shapes: list[tuple[int, int]], gaps: list[int], policy: str, prefix_caching: bool, depth: int
) -> None:
    """Among equals the first is never a victim, and nobody is one more often than those before it make tokens."""
    knobs = Knobs(groups=(Group(4),), num_blocks=13, budget_tokens=64, policy=policy, max_model_len=64)
    run = Timeline(scheduler, replace(knobs, prefix_caching=prefix_caching, runner="v2", pipeline_depth=depth))
    for number, ((prompt, output), gap) in enumerate(zip(shapes, gaps, strict=False)):
        run.submit(f"r{number}", prompt, output)
        run.ticks(gap)
    run.finish()
    num_tokens_before = 0
    for number, (_, output) in enumerate(shapes):
        assert run.preempted.get(f"r{number}", 0) <= num_tokens_before
        num_tokens_before += output
