# SPDX-License-Identifier: Apache-2.0
"""Fault 12 (ATOM PR 2305): while the pool is full, every waiting prompt is looked up again in every step."""

from __future__ import annotations

import pytest
from exact.counting_connector import PATH
from exact.timeline import Timeline
from scheduler_harness import Group, Knobs

pytestmark = pytest.mark.host_matrix


def test_one_lookup_per_request_and_frontier(scheduler: str) -> None:
    knobs = Knobs(
        groups=(Group(16),),
        num_blocks=640,
        budget_tokens=16_384,
        max_num_seqs=64,
        max_model_len=16_384,
        connector=PATH,
    )
    run = Timeline(scheduler, knobs)
    run.submit("holder", 9_000, 200)
    run.ticks(2)
    for number in range(50):
        run.submit(f"w{number}", 10_000, 1)
    run.ticks(100)
    assert run.outcome("holder") is None, "the holder keeps the memory for all 100 ticks"
    lookups = run.scheduler.connector.lookups
    assert max(lookups.values()) == 1, lookups.most_common(3)
