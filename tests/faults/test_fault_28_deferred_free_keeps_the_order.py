# SPDX-License-Identifier: Apache-2.0
"""Fault 28 (vLLM 48489): blocks that are freed late lose the order in which a group's blocks may be evicted.

What goes first is told by events: the pool is filled with other content, and the removals name the prompt's keys in order.
"""

from __future__ import annotations

from typing import Any

import pytest
from exact.replica import record_events
from exact.store_connector import PATH
from exact.timeline import Timeline
from exact.workload import words
from scheduler_knobs import Group, Knobs

from tokenspeed_plugin.scheduler_fsm._core import KvEventKind

pytestmark = pytest.mark.host_matrix
PROMPT = words(7, 25)
GROUPS = (Group(4), Group(4, 8))


@pytest.fixture(autouse=True)
def recorded_events(monkeypatch: pytest.MonkeyPatch) -> None:
    record_events(monkeypatch)


def timeline(**connector: Any) -> Timeline:
    knobs = {"connector": PATH, "connector_options": connector} if connector else {}
    return Timeline("tokenspeed", Knobs(groups=GROUPS, num_blocks=24, max_num_seqs=2, max_model_len=128, **knobs))


def eviction_order(run: Timeline) -> list[tuple[int, int]]:
    """(group, block of the prompt) in the order of eviction, after the prompt's request ended."""
    core = run.scheduler._core
    stored: dict[tuple[int, bytes], int] = {}
    parents = {kind_group_key(event): event for event in core.drain_kv_events()}
    for (group, key), event in parents.items():
        depth, parent = 0, event[4]
        while parent is not None and (group, parent) in parents:
            depth, parent = depth + 1, parents[group, parent][4]
        stored[group, key] = depth
    run.submit("other", 70, 1)
    run.finish()
    order = []
    for kind, group, _, key, *_ in core.drain_kv_events():
        if kind == KvEventKind.REMOVED and (group, key) in stored:
            order.append((group, stored[group, key]))
    return order


def kind_group_key(event: tuple[Any, ...]) -> tuple[int, bytes]:
    return event[1], event[3]


def immediate() -> Timeline:
    run = timeline()
    run.submit("one", PROMPT, 1)
    run.finish()
    return run


def after_a_send() -> Timeline:
    """A connector reads the blocks for some steps after the request ended."""
    run = timeline(send_steps=4)
    run.submit("one", PROMPT, 1)
    run.finish()
    return run


def test_late_and_immediate_frees_are_evicted_in_the_same_order() -> None:
    expected = eviction_order(immediate())
    assert expected, "the prompt was evicted"
    assert eviction_order(after_a_send()) == expected


@pytest.mark.parametrize("start", [immediate, after_a_send])
def test_tail_goes_before_head_within_each_group(start: Any) -> None:
    order = eviction_order(start())
    for group in range(len(GROUPS)):
        depths = [depth for g, depth in order if g == group]
        assert len(depths) > 1
        # A window's blocks that were left behind while the prompt was computed may go before its end.
        end = depths if group == 0 else [depth for depth in depths if depth >= max(depths) - 1]
        assert end == sorted(end, reverse=True)
