# SPDX-License-Identifier: Apache-2.0
"""Fault 37 (sglang PR 37619): slots for states run out, and a checkpoint that nobody must have stops the engine."""

from __future__ import annotations

import pytest
from exact.timeline import Timeline
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix


@pytest.mark.parametrize("spare_blocks", [0, 1, 2])
def test_without_a_spare_block_a_checkpoint_is_skipped(scheduler: str, spare_blocks: int) -> None:
    """Two long prompts, one after the other, each with two states worth keeping; both run on, with or without."""
    groups = (Group(16, keeps_state=True), Group(16, keeps_state=True), Group(16))
    needed = 3 + 2 * 2
    run = Timeline(scheduler, Knobs(groups, needed + spare_blocks, budget_tokens=96, max_model_len=128, match_tokens=4))
    for number in range(2):
        run.submit(f"r{number}", 44, 4)
        run.finish(60)
    counters = run.scheduler._core.counters()
    assert counters["lost_checkpoints"] == 2 * (2 - spare_blocks)
    assert counters["block_copies"] == 2 * spare_blocks
    assert not run.preempted


def test_two_prompts_at_a_time_share_what_is_spare(scheduler: str) -> None:
    groups = (Group(16, keeps_state=True), Group(16))
    run = Timeline(scheduler, Knobs(groups, 2 * (3 + 2), budget_tokens=96, max_model_len=128, match_tokens=4))
    for number in range(2):
        run.submit(f"r{number}", 44, 4)
    run.finish(60)
    counters = run.scheduler._core.counters()
    assert counters["block_copies"] + counters["lost_checkpoints"] == 2
    assert counters["lost_checkpoints"] > 0
    assert not run.preempted
