# SPDX-License-Identifier: Apache-2.0
"""Chunked local attention (Llama 4): a token reads back to the last multiple of the chunk, and no further."""

from __future__ import annotations

import pytest
from exact.timeline import Timeline
from exact.workload import words
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix

CHUNK = Group(4, window_tokens=8, window_is_chunk=True)


@pytest.mark.parametrize("shared_tokens", [20, 24, 30])
def test_a_hit_needs_only_the_chunk_that_it_ends_in(shared_tokens: int) -> None:
    run = Timeline("tokenspeed", Knobs((CHUNK, Group(4)), 60, budget_tokens=32, max_model_len=64))
    for number in range(3):
        run.submit(f"r{number}", words(1, shared_tokens) + words(10 + number, 9), 4)
        run.finish(40)
        if number:
            assert run.cached[f"r{number}"] == shared_tokens // 4 * 4
    run.submit("fresh", words(1, shared_tokens) + words(20, 9), 4)
    run.tick()
    (new,) = run.plans[-1].scheduled_new_reqs
    first = shared_tokens // 4 * 4 // 8 * 2
    assert new.block_ids[0][:first] == [0] * first
    assert all(new.block_ids[0][first:])
    assert all(new.block_ids[1])
    run.finish(40)
