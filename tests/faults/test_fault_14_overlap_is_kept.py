# SPDX-License-Identifier: Apache-2.0
"""Fault 14 (vllm PR 43724): a custom scheduler class built on the synchronous base silently loses the overlap."""

from __future__ import annotations

import pytest
from exact.timeline import Timeline
from scheduler_harness import Group, Knobs

pytestmark = pytest.mark.host_matrix


@pytest.mark.parametrize(("runner", "depth"), [("v1", 2), ("v2", 2), ("v2", 3), ("v2", 4)])
def test_next_step_is_planned_before_the_last_result_is_in(scheduler: str, runner: str, depth: int) -> None:
    """With async scheduling on, each decoding request is in the second of two steps planned back to back."""
    knobs = Knobs(groups=(Group(4),), num_blocks=64, budget_tokens=64, runner=runner, pipeline_depth=depth)
    run = Timeline(scheduler, knobs)
    run.submit("a", 7, 30)
    run.submit("b", 5, 30)
    run.ticks(40)
    in_flight = [len(plan.num_scheduled_tokens) for plan in run.plans[depth : depth + 20]]
    expected = 2 * 20 / (depth - 1)
    assert sum(in_flight) >= expected - 2, f"the pipeline has holes: {in_flight}"
    run.finish()


def test_one_result_per_tick_with_two_batches_in_flight(scheduler: str) -> None:
    """Overlap means as many ticks as tokens, plus the pipeline's depth."""
    run = Timeline(scheduler, Knobs(groups=(Group(4),), num_blocks=64, runner="v2", pipeline_depth=2))
    run.submit("a", 7, 30)
    run.finish()
    assert run.end["a"] <= 30 + 2
