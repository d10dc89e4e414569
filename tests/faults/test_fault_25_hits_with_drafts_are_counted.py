# SPDX-License-Identifier: Apache-2.0
"""Fault 25 (vllm-ascend #16639): a match unit of 1536 tokens and a dropped last block: no hits, or hits that no counter shows."""

from __future__ import annotations

import pytest
from exact.timeline import Timeline
from exact.workload import words
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix


@pytest.mark.parametrize("prompt_tokens", [2000, 4000])
@pytest.mark.parametrize("num_spec_tokens", [0, 3])
def test_the_counter_says_what_requests_got(scheduler: str, prompt_tokens: int, num_spec_tokens: int) -> None:
    knobs = Knobs((Group(1536),), 24, budget_tokens=8192, max_model_len=8192, num_spec_tokens=num_spec_tokens)
    run = Timeline(scheduler, knobs)
    run.scheduler.make_stats()
    for number in range(3):
        run.submit(f"r{number}", words(1, prompt_tokens), 4)
        run.finish(60)
    reused_tokens = (prompt_tokens - 1) // 128 * 128
    assert [run.cached[f"r{number}"] for number in range(3)] == [0, reused_tokens, reused_tokens]
    counters = run.scheduler._core.counters()
    assert counters["cache_hit_tokens"] == 2 * reused_tokens
    assert counters["cache_queried_tokens"] == 3 * prompt_tokens
