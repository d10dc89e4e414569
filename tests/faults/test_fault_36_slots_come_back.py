# SPDX-License-Identifier: Apache-2.0
"""Fault 36 (tokenspeed PR 182): a slot is overwritten while it is held, and never comes back."""

from __future__ import annotations

import pytest
from exact.timeline import Timeline
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix


@pytest.mark.parametrize(("runner", "depth"), [("v1", 1), ("v1", 2), ("v2", 1), ("v2", 2)])
def test_a_thousand_requests_through_two_slots(scheduler: str, runner: str, depth: int) -> None:
    """Requests end in every state: waiting, prefilling, decoding, preempted, finished. Both slots stay usable."""
    knobs = Knobs(
        groups=(Group(4),),
        num_blocks=10,
        max_num_seqs=2,
        budget_tokens=8,
        max_model_len=64,
        runner=runner,
        pipeline_depth=depth,
    )
    run = Timeline(scheduler, knobs)
    for number in range(1_000):
        run.submit(f"r{number}", 1 + number % 20, 1 + number % 7)
        if number % 3:
            run.ticks(number % 5)
            run.abort(f"r{number}")
    run.finish(6_000)
    run.submit("x", 3, 6)
    run.submit("y", 3, 6)
    run.ticks(depth + 1)
    assert {"x", "y"} <= set(run.first_token)
    run.finish()
