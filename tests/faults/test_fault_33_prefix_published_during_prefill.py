# SPDX-License-Identifier: Apache-2.0
"""Fault 33 (tokenspeed PR 381): a prefix can be hit only after its request has ended, so a burst of siblings misses."""

from __future__ import annotations

import pytest
from exact.timeline import Timeline
from exact.workload import words
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix


@pytest.mark.parametrize(("runner", "depth"), [("v1", 1), ("v1", 2), ("v2", 1), ("v2", 2)])
@pytest.mark.parametrize("windowed", [False, True])
def test_siblings_hit_while_the_first_still_runs(scheduler: str, runner: str, depth: int, windowed: bool) -> None:
    groups = (Group(16), Group(16, 32)) if windowed else (Group(16),)
    knobs = Knobs(groups=groups, num_blocks=400, budget_tokens=64, runner=runner, pipeline_depth=depth, max_num_seqs=8)
    run = Timeline(scheduler, knobs)
    prompt = words(1, 64)
    for number in range(8):
        run.submit(f"r{number}", prompt, 100)
        run.tick()
    run.ticks(4)
    assert [run.cached[f"r{number}"] >= 48 for number in range(1, 8)] == [True] * 7, run.cached
    run.finish()


def test_chunks_of_an_unfinished_prefill_can_be_hit(scheduler: str) -> None:
    knobs = Knobs(groups=(Group(16),), num_blocks=400, budget_tokens=32, long_prefill_threshold_tokens=16)
    run = Timeline(scheduler, knobs)
    prompt = words(1, 160)
    run.submit("first", prompt, 4)
    run.ticks(3)
    run.submit("second", prompt[:33] + words(2, 8), 4)
    run.ticks(6)
    assert run.cached.get("second", 0) >= 32
    run.finish()
