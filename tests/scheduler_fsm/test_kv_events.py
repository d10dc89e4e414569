# SPDX-License-Identifier: Apache-2.0
"""KV events: replaying what was published gives exactly the blocks that can be hit."""

from __future__ import annotations

import itertools

import pytest
from exact.replica import Replica, record_events
from exact.timeline import Timeline
from exact.workload import words
from scheduler_knobs import Group, Knobs

from tokenspeed_plugin.scheduler_fsm._core import EvictionSpec

pytestmark = pytest.mark.host_matrix


SHAPES = {
    "one layer": ((Group(4),), 128),
    "two layers": ((Group(4),), 2),
    "window": ((Group(4), Group(4, 8)), 128),
    "window in two layers": ((Group(4), Group(4, 8)), 2),
    "states": ((Group(4), Group(4, keeps_state=True)), 128),
    "states in two layers": ((Group(4, keeps_state=True), Group(4)), 2),
}


@pytest.fixture(params=itertools.product(SHAPES, ["session", "lru"]), ids=", ".join)
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Timeline:
    shape, policy = request.param
    groups, match_tokens = SHAPES[shape]
    record_events(monkeypatch, eviction=EvictionSpec(name=policy))
    knobs = Knobs(groups=groups, num_blocks=16 * len(groups), budget_tokens=32, match_tokens=match_tokens)
    run = Timeline("tokenspeed", knobs)
    run.replica = Replica(groups)
    feed = run.scheduler._events
    feed._enabled, feed._publisher = True, run.replica
    return run


def test_replaying_gives_the_hittable_set_after_every_step(run: Timeline) -> None:
    """How many there are; which they are is compared key by key in tests/cpp/scheduler_fsm/event_replica.h, in random traffic."""
    for number in range(8):
        run.submit(f"r{number}", words(1, 8) + words(10 + number, 9), 6)
    for _ in range(60):
        run.tick()
        assert len(run.replica.stored) == run.scheduler._core.counters()["cached_blocks"]
    run.finish()
    assert run.scheduler._core.counters()["evictions"] > 0
    assert len(run.replica.stored) == run.scheduler._core.counters()["cached_blocks"] > 0
    assert run.replica.num_clears == 0
    tokens = [token for event in run.replica.stored.values() for token in event.token_ids]
    assert len(tokens) == min(4, run.knobs.match_tokens) * len(run.replica.stored)


def test_a_reset_is_one_clear_and_lookups_are_none(run: Timeline) -> None:
    """Fault 32 (tokenspeed PR 166)."""
    for number in range(3):
        run.submit(f"r{number}", words(1, 12), 2)
        run.ticks(6)
    assert run.scheduler.reset_prefix_cache()
    run.submit("after", words(1, 12), 1)
    run.finish()
    assert run.replica.num_clears == 1
    assert len(run.replica.stored) == run.scheduler._core.counters()["cached_blocks"]
