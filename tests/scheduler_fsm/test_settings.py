# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler settings, one by one: what each does to plans."""

from __future__ import annotations

from typing import Any

import pytest
from exact.timeline import Timeline
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix
OURS = "tokenspeed"


def rows(run: Timeline) -> list[dict[str, int]]:
    return [plan.num_scheduled_tokens for plan in run.plans if plan.num_scheduled_tokens]


def test_without_chunked_prefill_a_prompt_runs_whole() -> None:
    knobs = Knobs(budget_tokens=64, max_model_len=64, scheduler={"enable_chunked_prefill": False})
    run = Timeline(OURS, knobs)
    for name, prompt in [("a", 40), ("b", 40), ("c", 20)]:
        run.submit(name, prompt, 4)
    run.finish()
    assert rows(run)[0] == {"a": 40, "c": 20}, "b waits for a step of its own and does not stop the scan"
    assert {step["b"] for step in rows(run) if "b" in step} == {40, 1}


def test_max_num_active_seqs_limits_who_runs() -> None:
    run = Timeline(OURS, Knobs(max_num_seqs=8, scheduler={"max_num_active_seqs": 2}))
    for number in range(6):
        run.submit(f"r{number}", 5, 6)
    run.finish()
    assert max(len(step) for step in rows(run)) == 2


def test_the_threshold_caps_a_long_prompt_while_others_are_there() -> None:
    run = Timeline(OURS, Knobs(budget_tokens=32, long_prefill_threshold_tokens=6))
    run.submit("alone", 60, 1)
    run.ticks(1)
    assert rows(run)[-1] == {"alone": 32}, "nobody is held up by a prompt that is alone"
    run.submit("other", 4, 8)
    run.ticks(1)
    assert rows(run)[-1] == {"alone": 6, "other": 4}
    run.finish()


def test_an_adaptive_threshold_never_falls_below_an_equal_share() -> None:
    knobs = Knobs(
        budget_tokens=32,
        long_prefill_threshold_tokens=6,
        scheduler={"long_prefill_token_threshold_adaptive": True},
    )
    run = Timeline(OURS, knobs)
    run.submit("a", 60, 1)
    run.submit("b", 60, 1)
    run.ticks(1)
    assert rows(run)[-1] == {"a": 16, "b": 16}
    run.finish()


@pytest.mark.parametrize(("reserve", "running"), [(True, {"a"}), (False, {"a", "b"})])
def test_reserving_the_whole_prompt_is_a_choice(reserve: bool, running: set[str]) -> None:
    knobs = Knobs(
        groups=(Group(4),),
        num_blocks=16,
        budget_tokens=16,
        prefix_caching=False,
        scheduler={"scheduler_reserve_full_isl": reserve},
    )
    run = Timeline(OURS, knobs)
    run.submit("a", 40, 2)
    run.submit("b", 40, 2)
    run.ticks(1)
    assert set(rows(run)[-1]) == running
    run.finish()


def test_the_watermark_keeps_blocks_free_only_while_something_runs() -> None:
    knobs = Knobs(
        groups=(Group(4),), num_blocks=10, budget_tokens=64, prefix_caching=False, scheduler={"watermark": 0.3}
    )
    run = Timeline(OURS, knobs)
    run.submit("whole", 40, 1)
    run.finish()
    assert run.outcome("whole") == "length", "alone it may fill the pool"
    run.submit("a", 8, 30)
    run.submit("b", 24, 1)
    run.ticks(2)
    assert set(rows(run)[-1]) == {"a"}
    run.finish()
    assert run.outcome("b") == "length"


def test_paused_requests_wait_and_go_on() -> None:
    from vllm.v1.core.sched.interface import PauseState

    run = Timeline(OURS, Knobs())
    run.submit("a", 5, 40)
    run.ticks(2)
    run.submit("b", 5, 2)
    run.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    run.ticks(2)
    assert set(rows(run)[-1]) == {"a"}
    assert run.scheduler.get_num_unfinished_requests() == 1
    run.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    before = len(rows(run))
    run.ticks(2)
    assert len(rows(run)) == before
    assert run.scheduler.get_num_unfinished_requests() == 0
    run.scheduler.set_pause_state(PauseState.UNPAUSED)
    run.finish()
    assert run.outcome("b") == "length"


def test_throttled_prefills_wait_for_decodes_but_not_for_ever() -> None:
    """Data-parallel ranks keep their prefills in the same steps."""
    run = Timeline(OURS, Knobs())
    run.submit("a", 5, 40)
    run.ticks(2)
    run.submit("b", 5, 2)
    plan: Any = run.scheduler.schedule(throttle_prefills=True)
    assert set(plan.num_scheduled_tokens) == {"a"}


def ticks_with(run: Timeline, request_id: str) -> list[int]:
    """Numbers of the non-empty steps in which a request ran, from 1."""
    return [number for number, step in enumerate(rows(run), 1) if request_id in step]


def test_a_prefill_interval_leaves_steps_to_decodes_alone() -> None:
    run = Timeline(OURS, Knobs(budget_tokens=16, scheduler={"prefill_schedule_interval": 4}))
    run.submit("a", 5, 60)
    run.ticks(2)
    run.submit("b", 40, 1)
    run.ticks(20)
    assert ticks_with(run, "a") == list(range(1, 23))
    assert ticks_with(run, "b") == [5, 9, 13], "chunks keep to the interval, too"
    run.finish()


def test_a_prefill_interval_holds_nothing_up_when_nothing_decodes() -> None:
    run = Timeline(OURS, Knobs(budget_tokens=16, scheduler={"prefill_schedule_interval": 4}))
    run.submit("a", 40, 1)
    run.finish()
    assert ticks_with(run, "a") == [1, 2, 3]


def test_a_prefill_interval_does_not_let_the_queue_grow() -> None:
    run = Timeline(OURS, Knobs(max_num_seqs=2, scheduler={"prefill_schedule_interval": 50}))
    for number in range(6):
        run.submit(f"r{number}", 5, 8 + number)
    run.finish(max_ticks=60)
    assert max(run.end.values()) < 45, "a slot that comes free is taken at once while others wait"


def test_a_held_back_request_retracts_nobody() -> None:
    knobs = Knobs(max_num_seqs=1, policy="priority", scheduler={"prefill_schedule_interval": 6})
    run = Timeline(OURS, knobs)
    run.submit("low", 5, 30, priority=5)
    run.ticks(2)
    run.submit("high", 5, 2, priority=0)
    run.ticks(3)
    assert run.preempted == {}
    run.ticks(4)
    assert run.preempted == {"low": 1}
    run.finish()
