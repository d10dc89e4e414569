# SPDX-License-Identifier: Apache-2.0
"""Fault 35 (tokenspeed PR 357): a list keeps a pointer to a cache entry that was pruned, and evicts it again.

The sanitizer build of the C++ core runs the same events; here the worker shows that no evicted block is ever hit.
"""

from __future__ import annotations

import random

import pytest
from exact.timeline import Timeline
from exact.workload import words
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix


@pytest.mark.parametrize(
    "groups",
    [(Group(4),), (Group(4), Group(4, 6)), (Group(4), Group(4, keeps_state=True))],
    ids=["full", "windowed", "states"],
)
def test_insert_reset_evict_insert(scheduler: str, groups: tuple[Group, ...]) -> None:
    run = Timeline(scheduler, Knobs(groups=groups, num_blocks=16 * len(groups), budget_tokens=64, max_model_len=64))
    prompt = words(1, 24)
    for turn in range(6):
        run.submit(f"insert{turn}", prompt + words(10 + turn, 3), 3)
        run.finish(40)
        assert run.scheduler.reset_prefix_cache()
        run.submit(f"evict{turn}", 40, 3)
        run.finish(40)
        run.submit(f"again{turn}", prompt + words(10 + turn, 3), 3)
        run.finish(40)
        assert run.cached[f"again{turn}"] == 0, "pruned and evicted: nothing to hit"


@pytest.mark.parametrize("seed", range(8))
def test_random_inserts_prunes_and_evictions(scheduler: str, seed: int) -> None:
    draw = random.Random(seed)
    run = Timeline(scheduler, Knobs(groups=(Group(4),), num_blocks=20, budget_tokens=64, max_model_len=64))
    for number in range(60):
        prompt = words(draw.randrange(4), draw.randint(1, 40)) + words(100 + draw.randrange(4), draw.randint(1, 8))
        run.submit(f"r{number}", prompt, draw.randint(1, 6))
        run.ticks(draw.randint(0, 4))
        if draw.random() < 0.1:
            run.scheduler.reset_prefix_cache()
        if draw.random() < 0.2:
            run.abort(f"r{draw.randint(0, number)}")
    run.finish()
