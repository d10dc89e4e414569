# SPDX-License-Identifier: Apache-2.0
"""Fault 6 (vllm #40004, PR 54530): with all slots taken, an urgent arrival waits for one that is not."""

from __future__ import annotations

import pytest
from exact.relaxed import relaxed
from exact.timeline import Timeline
from hypothesis import given
from hypothesis import strategies as st
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix


def make_run(scheduler: str, num_blocks: int = 1_000, **shape: object) -> Timeline:
    knobs = Knobs(groups=(Group(4),), num_blocks=num_blocks, max_num_seqs=2, policy="priority", max_model_len=2048)
    return Timeline(scheduler, knobs if not shape else Knobs(**{**vars(knobs), **shape}))


@pytest.mark.parametrize(("runner", "depth"), [("v1", 1), ("v1", 2), ("v2", 1), ("v2", 2)])
def test_urgent_request_takes_a_slot(scheduler: str, runner: str, depth: int) -> None:
    run = make_run(scheduler, runner=runner, pipeline_depth=depth)
    run.submit("low1", 4, 1000, priority=5)
    run.submit("low2", 4, 1000, priority=5)
    run.ticks(5)
    run.submit("urgent", 4, 2, priority=0)
    arrived = run.report.ticks
    run.ticks(6)
    assert run.outcome("urgent") == "length"
    assert run.first_token["urgent"] - arrived <= depth + 1
    assert sum(run.preempted.values()) == 1, "one victim is enough"
    assert run.preempted.get("low1", 0) == 0, "the later of two equals is the victim"
    run.finish(3_000)


def test_equal_priority_never_displaces(scheduler: str) -> None:
    run = make_run(scheduler)
    run.submit("one", 4, 40, priority=5)
    run.submit("two", 4, 40, priority=5)
    run.ticks(5)
    run.submit("three", 4, 2, priority=5)
    run.finish()
    assert not run.preempted
    assert run.end["three"] > run.end["one"]


def test_nobody_is_displaced_for_a_request_that_cannot_be_admitted(scheduler: str) -> None:
    """The newcomer needs more than all less urgent requests hold, so taking their memory would help nobody."""
    run = make_run(scheduler, num_blocks=12)
    run.submit("more urgent", 17, 8, priority=0)
    run.submit("low", 4, 12, priority=5)
    run.ticks(3)
    run.submit("newcomer", 40, 2, priority=1)
    run.ticks(4)
    assert not run.preempted
    run.finish()


@relaxed
@given(num_slots=st.integers(1, 4), priority=st.integers(0, 9), prompt=st.integers(1, 20), depth=st.integers(1, 2))
def test_a_slot_is_taken_from_the_less_urgent_and_from_nobody_else(
    scheduler: str, num_slots: int, priority: int, prompt: int, depth: int
) -> None:
    run = make_run(scheduler, max_num_seqs=num_slots, runner="v2", pipeline_depth=depth)
    for number in range(num_slots):
        run.submit(f"low{number}", 4, 60, priority=5)
    run.ticks(5)
    run.submit("new", prompt, 1, priority=priority)
    run.ticks(depth + 1)
    is_urgent = priority < 5
    assert ("new" in run.first_token) == is_urgent
    assert run.preempted == ({f"low{num_slots - 1}": 1} if is_urgent else {})
    run.finish()
