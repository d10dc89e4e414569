# SPDX-License-Identifier: Apache-2.0
"""Fault 12 (ATOM PR 2305): with the pool full, every waiting request asks the external tier again in every step."""

from __future__ import annotations

import pytest
from exact.store_connector import PATH
from exact.timeline import Timeline
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix
NUM_WAITING = 50


def full_pool() -> Timeline:
    knobs = Knobs(
        groups=(Group(16),),
        num_blocks=640,
        budget_tokens=16_384,
        max_num_seqs=64,
        max_model_len=16_384,
        connector=PATH,
    )
    run = Timeline("tokenspeed", knobs)
    run.submit("holder", 9_000, 120)
    run.ticks(2)
    for number in range(NUM_WAITING):
        run.submit(f"w{number}", 10_000, 1)
    return run


def test_one_lookup_per_request_and_frontier() -> None:
    run = full_pool()
    run.ticks(100)
    assert run.outcome("holder") is None, "the holder keeps the memory for all 100 ticks"
    lookups = run.scheduler.connector.lookups
    waiting = {key: count for key, count in lookups.items() if key[0] != "holder"}
    assert max(waiting.values(), default=0) <= 1, lookups.most_common(3)


def test_they_are_asked_for_once_there_is_memory() -> None:
    run = full_pool()
    run.ticks(400)
    assert run.outcome("holder") is not None
    lookups = run.scheduler.connector.lookups
    assert {key[0] for key in lookups} == {"holder", *(f"w{number}" for number in range(NUM_WAITING))}
    assert max(lookups.values()) == 1, lookups.most_common(3)
