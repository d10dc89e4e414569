# SPDX-License-Identifier: Apache-2.0
"""Fault 7 (vllm #57413): a very long prompt takes every chunk, and short prompts wait for all of it."""

from __future__ import annotations

import pytest
from exact.relaxed import relaxed
from exact.timeline import Timeline
from hypothesis import given
from hypothesis import strategies as st
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix

FIRST_TOKEN_BOUND_TICKS = 8


@pytest.mark.parametrize(("runner", "depth"), [("v1", 1), ("v1", 2), ("v2", 1), ("v2", 2)])
@pytest.mark.parametrize("long_tokens", [200, 800])
def test_short_prompt_behind_a_long_one(scheduler: str, runner: str, depth: int, long_tokens: int) -> None:
    knobs = Knobs(groups=(Group(4),), num_blocks=400, budget_tokens=8, max_num_seqs=8, max_model_len=1024)
    run = Timeline(scheduler, Knobs(**{**vars(knobs), "runner": runner, "pipeline_depth": depth}))
    run.submit("r1", long_tokens, 4)
    run.tick()
    run.submit("r2", 4, 4)
    run.tick()
    run.submit("r3", 4, 4)
    run.ticks(FIRST_TOKEN_BOUND_TICKS)
    assert {"r2", "r3"} <= set(run.first_token), "no first token within the bound"
    run.finish()
    alone = long_tokens / knobs.budget_tokens
    assert run.end["r1"] <= alone + 16, "the long prompt loses only what the short ones used"


def test_a_stream_of_short_prompts_leaves_the_long_one_its_share(scheduler: str) -> None:
    knobs = Knobs(groups=(Group(4),), num_blocks=400, budget_tokens=8, max_num_seqs=8, max_model_len=1024)
    run = Timeline(scheduler, knobs)
    run.submit("long", 200, 2)
    for number in range(100):
        run.submit(f"short{number}", 8, 1)
        run.tick()
    assert run.computed["long"] >= 200, "at least a quarter of the budget of 100 ticks"
    run.finish()


@relaxed
@given(
    budget=st.integers(4, 32),
    long_tokens=st.integers(60, 400),
    shorts=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    delay=st.integers(1, 6),
)
def test_short_prompts_wait_for_each_other_and_not_for_the_long_one(
    scheduler: str, budget: int, long_tokens: int, shorts: list[int], delay: int
) -> None:
    """Half of the budget is theirs, whatever the long prompt still needs."""
    run = Timeline(
        scheduler, Knobs(groups=(Group(4),), num_blocks=400, budget_tokens=budget, max_num_seqs=8, max_model_len=512)
    )
    run.submit("long", long_tokens, 1)
    run.ticks(delay)
    for number, prompt in enumerate(shorts):
        run.submit(f"short{number}", prompt, 1)
    run.ticks(1 + -(-sum(shorts) // (budget // 2)) + len(shorts))
    assert {f"short{number}" for number in range(len(shorts))} <= set(run.first_token)
    run.finish()
