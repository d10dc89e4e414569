# SPDX-License-Identifier: Apache-2.0
"""Fault 24 (vllm #54458): each of 23 groups takes giant pages for a prompt of 12 tokens, and requests queue up."""

from __future__ import annotations

import pytest
from exact.timeline import Timeline
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix


def test_a_short_request_holds_one_block_of_each_group(scheduler: str) -> None:
    groups = (*(Group(64, keeps_state=True) for _ in range(22)), Group(64))
    run = Timeline(scheduler, Knobs(groups, 69, budget_tokens=64, max_model_len=256))
    for number in range(6):
        run.submit(f"r{number}", 12, 4)
    run.tick()
    assert sum(f"r{number}" in run.computed for number in range(6)) == 3
    run.finish(60)
    assert not run.preempted
