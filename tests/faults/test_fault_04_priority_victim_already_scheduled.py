# SPDX-License-Identifier: Apache-2.0
"""Fault 4 (vllm #23347, PR 28558): a request already scheduled in this step is chosen as the victim."""

from __future__ import annotations

import itertools

import pytest
from exact.timeline import Timeline
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix


@pytest.mark.parametrize("num_spec_tokens", [0, 3])
@pytest.mark.parametrize(("runner", "depth"), list(itertools.product(("v1", "v2"), (1, 2))))
@pytest.mark.parametrize("num_blocks", [7, 8, 9, 10])
def test_victim_leaves_the_plan_whole(
    scheduler: str, runner: str, depth: int, num_spec_tokens: int, num_blocks: int
) -> None:
    """The worker checks that sums, budgets, drafts and tables of every plan agree; both get exactly their tokens."""
    knobs = Knobs(
        groups=(Group(4),),
        num_blocks=num_blocks,
        max_num_seqs=4,
        budget_tokens=16,
        policy="priority",
        runner=runner,
        pipeline_depth=depth,
        num_spec_tokens=num_spec_tokens,
        max_model_len=64,
    )
    run = Timeline(scheduler, knobs)
    run.submit("A", 7, 9, priority=2)
    run.ticks(2)
    run.submit("B", 7, 9, priority=0)
    run.submit("C", 3, 5, priority=1)
    run.finish()
    assert all(run.outcome(name) == "length" for name in "ABC")
    assert run.preempted.get("B", 0) == 0, "the most urgent request is never the victim"
    if num_blocks == 7 and not num_spec_tokens:
        assert run.preempted["A"] >= 1, "the pool is one block short, so the least urgent has to go"
