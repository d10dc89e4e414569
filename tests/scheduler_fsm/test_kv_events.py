# SPDX-License-Identifier: Apache-2.0
"""KV events: replaying what was published gives exactly the blocks that can be hit."""

from __future__ import annotations

from typing import Any

import pytest
from exact.timeline import Timeline
from exact.workload import words
from scheduler_knobs import Group, Knobs

from tokenspeed_plugin.scheduler_fsm import config_map

pytestmark = pytest.mark.host_matrix


class Replica:
    """A subscriber that keeps the set of stored blocks."""

    def __init__(self) -> None:
        self.stored: dict[bytes, Any] = {}
        self.num_clears = 0

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            kind = type(event).__name__
            if kind == "BlockStored":
                (key,) = event.block_hashes
                assert key not in self.stored
                assert event.parent_block_hash is None or event.parent_block_hash in self.stored
                self.stored[key] = event
            elif kind == "BlockRemoved":
                for key in event.block_hashes:
                    del self.stored[key]
            else:
                self.num_clears += 1
                self.stored.clear()


@pytest.fixture(params=[128, 2], ids=["one layer", "two layers"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Timeline:
    original = config_map._kv_config

    def recording(*args: Any) -> Any:
        config = original(*args)
        config.record_events = True
        return config

    monkeypatch.setattr(config_map, "_kv_config", recording)
    knobs = Knobs(groups=(Group(4),), num_blocks=16, budget_tokens=32, match_tokens=request.param)
    run = Timeline("tokenspeed", knobs)
    run.replica = Replica()
    feed = run.scheduler._events
    feed._enabled, feed._publisher = True, run.replica
    return run


def test_replaying_gives_the_hittable_set(run: Timeline) -> None:
    for number in range(8):
        run.submit(f"r{number}", words(1, 8) + words(10 + number, 9), 6)
    run.ticks(60)
    run.finish()
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
