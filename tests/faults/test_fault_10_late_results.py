# SPDX-License-Identifier: Apache-2.0
"""Fault 10 (smg PR 1465): a result arrives for a request that has ended, or arrives twice, and the process dies."""

from __future__ import annotations

import copy

import pytest
from exact.timeline import Timeline
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix

SHAPES = [("v1", 1), ("v1", 2), ("v2", 1), ("v2", 2)]


def make_run(scheduler: str, runner: str, depth: int, **more: object) -> Timeline:
    knobs = {"groups": (Group(4),), "num_blocks": 32, "budget_tokens": 16, "runner": runner, "pipeline_depth": depth}
    return Timeline(scheduler, Knobs(**{**knobs, **more}))


def outputs_of(batches: dict[int, object]) -> list[object]:
    return [output for batch in batches.values() for output in batch.outputs]


@pytest.mark.parametrize(("runner", "depth"), SHAPES)
@pytest.mark.parametrize("ticks_before", [1, 2, 5])
def test_result_of_an_aborted_request(scheduler: str, runner: str, depth: int, ticks_before: int) -> None:
    run = make_run(scheduler, runner, depth)
    run.submit("X", 9, 20)
    run.submit("Y", 7, 12)
    run.ticks(ticks_before)
    plan = run.scheduler.schedule()
    result = run.worker.execute(plan)
    assert "X" in plan.num_scheduled_tokens
    run.abort("X")
    run._queue.append((plan, result))
    run.finish()
    assert run.outcome("Y") == "length"
    assert run.delivered("Y") == 12


@pytest.mark.parametrize(("runner", "depth"), SHAPES)
@pytest.mark.parametrize("ticks_before", [1, 2, 5])
def test_result_that_arrives_twice(scheduler: str, runner: str, depth: int, ticks_before: int) -> None:
    """The second copy changes nothing: no output, no token, no block (the rest of the run stays exact)."""
    run = make_run(scheduler, runner, depth)
    run.submit("X", 9, 12)
    run.submit("Y", 7, 12)
    run.ticks(ticks_before)
    if not run._queue:
        run._schedule()
    plan, result = run._queue[0]
    again = copy.deepcopy(result.output)
    run._update()
    assert not outputs_of(run.scheduler.update_from_output(plan, again))
    run.finish()
    assert run.delivered("X") == run.delivered("Y") == 12


@pytest.mark.parametrize(("runner", "depth"), SHAPES)
def test_result_after_the_end_arrives_twice(scheduler: str, runner: str, depth: int) -> None:
    run = make_run(scheduler, runner, depth)
    run.submit("X", 9, 1)
    plan = run.scheduler.schedule()
    result = run.worker.execute(plan)
    again = copy.deepcopy(result.output)
    run._queue.append((plan, result))
    run._update()
    assert run.outcome("X") == "length"
    assert not outputs_of(run.scheduler.update_from_output(plan, again))
    run.finish()


@pytest.mark.parametrize(("runner", "depth"), SHAPES)
def test_disconnect_frees_the_slot_once(scheduler: str, runner: str, depth: int) -> None:
    run = make_run(scheduler, runner, depth, max_num_seqs=2)
    for number in range(20):
        run.submit(f"gone{number}", 9, 20)
        run.ticks(number % 4)
        run.abort(f"gone{number}")
        run.abort(f"gone{number}")
    run.submit("a", 5, 8)
    run.submit("b", 5, 8)
    run.ticks(depth + 1)
    assert {"a", "b"} <= set(run.first_token), "both slots are free again"
    run.finish()
