# SPDX-License-Identifier: Apache-2.0
"""Fault 34 (tokenspeed PR 562, 249): admission counts memory as free that the acquire then does not get."""

from __future__ import annotations

from dataclasses import replace

import pytest
from exact.relaxed import relaxed
from exact.timeline import Timeline
from hypothesis import given
from hypothesis import strategies as st
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix

GROUPS = {
    "full": (Group(4),),
    "windowed": (Group(4), Group(4, 6)),
    "states": (Group(4), Group(4, keeps_state=True)),
}


def blocks_for(groups: tuple[Group, ...], num_tokens: int) -> int:
    blocks = [(group, -(-num_tokens // group.block_tokens)) for group in groups]
    # A state group holds the state that a step starts from, and the one that it leaves behind.
    return sum(min(count, 2) if group.keeps_state else count for group, count in blocks)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("prompt_tokens", range(1, 26))
def test_a_pool_of_exactly_the_need_is_enough(scheduler: str, groups: tuple[Group, ...], prompt_tokens: int) -> None:
    """Every boundary: the request runs at once, to its end, without a preemption and without a refusal."""
    num_blocks = blocks_for(groups, prompt_tokens + 4)
    run = Timeline(scheduler, Knobs(groups=groups, num_blocks=num_blocks, budget_tokens=64, max_model_len=64))
    run.submit("r", prompt_tokens, 4)
    run.tick()
    assert run.scheduled_ticks("r") == [0]
    run.finish(40)
    assert not run.preempted


@pytest.mark.parametrize("prompt_tokens", range(1, 26))
@pytest.mark.parametrize("missing_blocks", [0, 1])
def test_two_are_admitted_together_only_when_both_prompts_fit(
    scheduler: str, prompt_tokens: int, missing_blocks: int
) -> None:
    groups = GROUPS["full"]
    num_blocks = 2 * blocks_for(groups, prompt_tokens) - missing_blocks
    alone = blocks_for(groups, prompt_tokens + 1)
    run = Timeline(
        scheduler, Knobs(groups=groups, num_blocks=max(num_blocks, alone), budget_tokens=64, max_model_len=64)
    )
    run.submit("r1", prompt_tokens, 1)
    run.submit("r2", prompt_tokens, 1)
    run.tick()
    together = max(num_blocks, alone) >= 2 * blocks_for(groups, prompt_tokens)
    assert ("r2" in run.computed) == together
    run.finish(40)
    assert not run.preempted


@pytest.mark.parametrize("small_tokens", [9, 12, 16])
def test_a_promise_made_in_this_step_counts(scheduler: str, small_tokens: int) -> None:
    """The long prompt is admitted but holds no block yet: the pool looks empty, yet the short one may not have it."""
    run = Timeline(scheduler, Knobs(groups=(Group(4),), num_blocks=10, budget_tokens=16, max_model_len=64))
    run.submit("big", 36, 4)
    run.submit("small", small_tokens, 4)
    run.finish(60)
    assert (run.delivered("big"), run.delivered("small")) == (4, 4)


@relaxed
@given(
    shapes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=8),
    groups=st.sampled_from(list(GROUPS.values())),
    budget=st.integers(4, 64),
    depth=st.integers(1, 2),
)
def test_whoever_is_admitted_into_a_pool_that_holds_all_stays(
    scheduler: str, shapes: list[tuple[int, int]], groups: tuple[Group, ...], budget: int, depth: int
) -> None:
    num_blocks = sum(blocks_for(groups, prompt + output) for prompt, output in shapes)
    knobs = Knobs(groups=groups, num_blocks=num_blocks, budget_tokens=budget, max_model_len=64)
    run = Timeline(scheduler, replace(knobs, prefix_caching=False, runner="v2", pipeline_depth=depth))
    for number, (prompt, output) in enumerate(shapes):
        run.submit(f"r{number}", prompt, output)
    run.finish()
    assert not run.preempted
    assert all(run.delivered(f"r{number}") == output for number, (_, output) in enumerate(shapes))
