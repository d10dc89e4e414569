# SPDX-License-Identifier: Apache-2.0
"""Fault 14 (vllm PR 43724): a custom scheduler class built on the synchronous base silently loses the overlap."""

from __future__ import annotations

import pytest
from exact.relaxed import relaxed
from exact.timeline import Timeline
from hypothesis import given
from hypothesis import strategies as st
from scheduler_knobs import Group, Knobs

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


@relaxed
@given(
    shapes=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 30)), min_size=1, max_size=6),
    runner=st.sampled_from(["v1", "v2"]),
)
def test_no_tick_is_lost_at_depth_two(scheduler: str, shapes: list[tuple[int, int]], runner: str) -> None:
    run = Timeline(
        scheduler, Knobs(groups=(Group(4),), num_blocks=128, budget_tokens=64, runner=runner, pipeline_depth=2)
    )
    for number, (prompt, output) in enumerate(shapes):
        run.submit(f"r{number}", prompt, output)
    run.finish()
    assert all(run.end[f"r{number}"] <= output + 1 for number, (_, output) in enumerate(shapes))
