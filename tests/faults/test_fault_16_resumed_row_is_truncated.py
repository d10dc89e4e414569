# SPDX-License-Identifier: Apache-2.0
"""Fault 16 (vllm-tt-plugin #57): the scheduler's output is shorter than the runner's copy, which replays a stale token."""

from __future__ import annotations

import pytest
from exact.timeline import Timeline
from exact.workload import Reset
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix


@pytest.mark.parametrize("num_spec_tokens", [0, 3])
@pytest.mark.parametrize(("runner", "depth"), [("v1", 1), ("v1", 2), ("v2", 1), ("v2", 2)])
@pytest.mark.parametrize("reset_tick", range(1, 8))
def test_reset_with_output_in_flight(
    scheduler: str, runner: str, depth: int, num_spec_tokens: int, reset_tick: int
) -> None:
    """A reset that preempts running requests may drop sampled tokens; the counts sent must make the runner forget them."""
    knobs = Knobs(
        groups=(Group(4),),
        num_blocks=64,
        budget_tokens=16,
        runner=runner,
        pipeline_depth=depth,
        num_spec_tokens=num_spec_tokens,
    )
    run = Timeline(scheduler, knobs)
    run._resets = {reset_tick: Reset(reset_tick, reset_running=True)}
    run.submit("a", 9, 14)
    run.submit("b", 5, 14)
    run.finish()
    assert run.delivered("a") == run.delivered("b") == 14


@pytest.mark.parametrize("depth", [1, 2])
def test_resumed_count_is_what_was_delivered(scheduler: str, depth: int) -> None:
    """V1 protocol: `num_output_tokens` and `all_token_ids` of a resumed request describe exactly the delivered output."""
    knobs = Knobs(groups=(Group(4),), num_blocks=9, budget_tokens=64, runner="v1", pipeline_depth=depth)
    run = Timeline(scheduler, knobs)
    for name in ("a", "b", "c"):
        run.submit(name, 9, 20)
    checked = 0
    while not run.done:
        before = {name: run.delivered(name) for name in ("a", "b", "c")}
        num_plans = len(run.plans)
        run.tick()
        for plan in run.plans[num_plans:]:
            cached = plan.scheduled_cached_reqs
            for request_id in cached.resumed_req_ids:
                index = cached.req_ids.index(request_id)
                assert cached.num_output_tokens[index] == before[request_id]
                assert len(cached.all_token_ids[request_id]) == 9 + before[request_id]
                checked += 1
    assert checked > 0
    run.check_end()
