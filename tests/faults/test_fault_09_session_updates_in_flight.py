# SPDX-License-Identifier: Apache-2.0
"""Fault 9 (vllm #42490): two updates of a session before queued work drains put placeholders into the worker's row."""

from __future__ import annotations

import pytest
from exact.timeline import Timeline, hash_of
from exact.workload import words
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix


@pytest.mark.parametrize(("runner", "depth"), [("v1", 1), ("v1", 2), ("v2", 1), ("v2", 2)])
@pytest.mark.parametrize("num_updates_at_once", [1, 2, 3])
@pytest.mark.parametrize("ticks_before", [0, 1, 2, 3, 12])
def test_updates_before_the_pipeline_drains(
    scheduler: str, runner: str, depth: int, num_updates_at_once: int, ticks_before: int
) -> None:
    """No id below zero reaches the worker (it checks), and each chunk is answered as if it had come alone."""
    knobs = Knobs(groups=(Group(4),), num_blocks=64, budget_tokens=16, runner=runner, pipeline_depth=depth)
    run = Timeline(scheduler, knobs)
    shared = words(1, 12)
    run.submit("other", shared + words(2, 3), 20)
    run.submit("session", shared + words(3, 2), 4, extra={"resumable": True})
    run.ticks(ticks_before)
    for number in range(num_updates_at_once):
        run.update_session("session", words(hash_of(f"chunk{number}"), 5), 3)
    run.ticks(30)
    account = run.ledger.accounts["session"]
    assert account.is_waiting
    assert not account.updates
    run.close_session("session")
    run.finish()


@pytest.mark.parametrize(("runner", "depth"), [("v1", 2), ("v2", 2)])
def test_session_cut_off_while_updates_wait(scheduler: str, runner: str, depth: int) -> None:
    knobs = Knobs(groups=(Group(4),), num_blocks=64, budget_tokens=16, runner=runner, pipeline_depth=depth)
    run = Timeline(scheduler, knobs)
    run.submit("session", words(3, 14), 6, extra={"resumable": True})
    run.ticks(3)
    run.update_session("session", words(4, 5), 3)
    run.update_session("session", words(5, 5), 3)
    run.abort("session")
    run.finish()
