# SPDX-License-Identifier: Apache-2.0
"""Fault 9 (vllm #42490): two updates of a session before queued work drains put placeholders into the worker's row.

Sessions of streaming input are not there yet. Until they are, one is refused alone, by name, and the engine lives on.
"""

from __future__ import annotations

import pytest
from exact.timeline import Timeline
from exact.workload import words
from scheduler_harness import Group, Knobs

pytestmark = pytest.mark.host_matrix


@pytest.mark.parametrize(("runner", "depth"), [("v1", 1), ("v1", 2), ("v2", 1), ("v2", 2)])
def test_a_session_is_refused_alone(scheduler: str, runner: str, depth: int) -> None:
    knobs = Knobs(groups=(Group(4),), num_blocks=64, budget_tokens=16, runner=runner, pipeline_depth=depth)
    run = Timeline(scheduler, knobs)
    run.submit("other", words(2, 3), 20)
    run.submit("session", words(3, 2), 4, extra={"resumable": True}, refused=True)
    run.ticks(3)
    assert run.outcome("session") == "error"
    run.finish()
    assert run.outcome("other") == "length"
