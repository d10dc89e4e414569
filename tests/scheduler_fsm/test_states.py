# SPDX-License-Identifier: Apache-2.0
"""Models that mix attention with states (Mamba, GDN, KDA): the worker moves states by vLLM's rules and reads each one back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from exact.driver import Driver
from exact.memory import ExactError
from exact.relaxed import random_runs
from exact.strategies import Scenario, scenarios
from exact.timeline import Timeline
from exact.workload import Arrival, Workload, words
from exact_worker import run_scenario
from hypothesis import given
from hypothesis import strategies as st
from scheduler_harness import OURS, make_harness
from scheduler_knobs import REUSED_OF_COARSE_BLOCKS, RUNNER_SHAPES, Group, Knobs

pytestmark = pytest.mark.host_matrix


def hybrid(block_tokens: int, num_states: int = 3) -> tuple[Group, ...]:
    return (*(Group(block_tokens, keeps_state=True) for _ in range(num_states)), Group(block_tokens))


@pytest.mark.parametrize(("runner", "depth"), RUNNER_SHAPES)
@pytest.mark.parametrize(("block_tokens", "shared_tokens", "reused_tokens"), REUSED_OF_COARSE_BLOCKS)
def test_the_third_prompt_reuses_what_three_share(
    runner: str, depth: int, block_tokens: int, shared_tokens: int, reused_tokens: int
) -> None:
    """The second finds out where the first two part, and leaves the states behind there; what it could not use is counted."""
    knobs = Knobs(hybrid(block_tokens), 96, budget_tokens=4096, max_model_len=4096, runner=runner, pipeline_depth=depth)
    run = Timeline("tokenspeed", knobs)
    for number in range(4):
        run.submit(f"r{number}", words(1, shared_tokens) + words(10 + number, 50), 4)
        run.finish()
    assert [run.cached[f"r{number}"] for number in (0, 2, 3)] == [0, reused_tokens, reused_tokens]
    lost_tokens = run.scheduler._core.counters()["stateless_tokens"]
    assert run.cached["r1"] + lost_tokens == reused_tokens


def test_the_next_turn_of_a_session_starts_from_the_states_of_the_last() -> None:
    run = Timeline("tokenspeed", Knobs(hybrid(528), 96, budget_tokens=4096, max_model_len=8192))
    history = words(1, 700)
    reused_tokens = 0
    for turn in range(4):
        answer = run.submit(f"turn{turn}", history, 40).answer(8192)
        run.finish()
        assert run.cached[f"turn{turn}"] == reused_tokens
        # Behind the last logical block of the prompt, or the last block that the answer filled.
        reused_tokens = max((len(history) - 1) // 88 * 88, (len(history) + 39) // 528 * 528)
        history = history + list(answer.tokens) + words(10 + turn, 300)


def test_decoding_across_a_block_leaves_a_state_behind() -> None:
    run = Timeline("tokenspeed", Knobs(hybrid(16), 60, max_model_len=256))
    prompt = words(1, 20)
    answer = run.submit("first", prompt, 50).answer(256)
    run.finish()
    run.submit("next", prompt + list(answer.tokens), 4)
    run.finish()
    assert run.cached["next"] == 64


@st.composite
def state_scenarios(draw: st.DrawFn) -> Scenario:
    """Any traffic, on any mix of groups with one that keeps states."""
    scenario = draw(scenarios(max_depth=4, max_streams=draw(st.sampled_from([0, 0, 2]))))
    unit = draw(st.sampled_from([1, 2, 4]))
    kinds = [Group(unit * draw(st.sampled_from([1, 2, 4])), keeps_state=True) for _ in range(draw(st.integers(1, 2)))]
    if draw(st.booleans()):
        kinds.append(Group(unit * draw(st.sampled_from([1, 2, 4]))))
    if draw(st.booleans()):
        window = {"window_tokens": draw(st.integers(1, 20)), "window_is_chunk": draw(st.booleans())}
        kinds.append(Group(unit * draw(st.sampled_from([1, 2, 4])), **window))
    smallest = min(group.block_tokens for group in kinds)
    kinds = [replace(group, block_tokens=smallest * (group.block_tokens // smallest)) for group in kinds]
    knobs = replace(
        scenario.knobs,
        groups=tuple(draw(st.permutations(kinds))),
        match_tokens=draw(st.sampled_from([128, 1, 2, 4])),
        num_spec_tokens=0,
        prefix_caching=draw(st.sampled_from([True, True, True, False])),
    )
    most = max((arrival.most_tokens for arrival in scenario.workload.arrivals), default=1)
    needed = sum(-(-min(most, knobs.max_model_len) // group.block_tokens) + 1 for group in kinds)
    return replace(scenario, knobs=replace(knobs, num_blocks=needed + draw(st.sampled_from([0, 1, 4, 30]))))


@random_runs(150)
@given(scenario=state_scenarios())
def test_random_traffic(scenario: Scenario) -> None:
    run_scenario(OURS, scenario.knobs, scenario.workload, max_ticks=5_000)


def forget_copies(plan: Any) -> bool:
    done = bool(plan.kv_cache_block_copies)
    plan.kv_cache_block_copies = None
    return done


def swap_states(plan: Any) -> bool:
    for new in plan.scheduled_new_reqs:
        table = new.block_ids[0]
        if new.num_computed_tokens and len(table) > 1:
            table[-1], table[-2] = table[-2], table[-1]
            return True
    return False


def start_in_the_null_block(plan: Any) -> bool:
    for new in plan.scheduled_new_reqs:
        if new.num_computed_tokens:
            new.block_ids[0][(new.num_computed_tokens - 1) // 16] = 0
            return True
    return False


def start_too_late(plan: Any) -> bool:
    for new in plan.scheduled_new_reqs:
        if new.num_computed_tokens and plan.num_scheduled_tokens[new.req_id] > 4:
            new.num_computed_tokens += 4
            plan.num_scheduled_tokens[new.req_id] -= 4
            plan.total_num_scheduled_tokens -= 4
            return True
    return False


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("fault", [forget_copies, swap_states, start_in_the_null_block, start_too_late])
def test_the_worker_notices_a_wrong_state(fault: Callable[[Any], bool], runner: str) -> None:
    groups = (Group(16, keeps_state=True), Group(16))
    knobs = Knobs(groups, 60, budget_tokens=64, runner=runner, match_tokens=4)
    arrivals = [Arrival(6 * i, f"r{i}", words(1, 44) + words(9 + i, 10), 6) for i in range(6)]
    applied: list[Any] = []

    def change(plan: Any) -> Any:
        if fault(plan):
            applied.append(plan)
        return plan

    with pytest.raises(ExactError):
        Driver(make_harness(OURS, knobs), Workload(arrivals), wrap_plan=change).run(500)
    assert applied
