# SPDX-License-Identifier: Apache-2.0
"""Rates of single requests, what happens above capacity, and policies of other distributions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exact.timeline import Timeline
from exact.workload import words
from scheduler_knobs import Group, Knobs

from tokenspeed_plugin.hooks import hookimpl
from tokenspeed_plugin.hooks.plugin_manager import plugin_manager

pytestmark = pytest.mark.host_matrix

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "pacing.md"
KEY = "target_tps_per_user"


class Paced(Timeline):
    """On a virtual clock: a step takes 2 ms, and 0.5 ms for every token beyond one per request and for every request."""

    def __init__(self, knobs: Knobs, **settings: Any) -> None:
        settings = {"kv_eviction": "lru", **settings}
        super().__init__("tokenspeed", replace(knobs, additional_config={"tokenspeed": settings}))
        self.ledger.may_fail = True
        self.now_s = 0.0
        self.longest_ms = 0.0
        self.factor = 1.0
        self.harness.scheduler.use_clock(lambda: self.now_s)

    def _note_plan(self, plan: Any) -> Any:
        counts = plan.num_scheduled_tokens.values()
        step_ms = self.factor * (2 + 0.5 * sum(counts)) if counts else 1.0
        self.longest_ms = max(self.longest_ms, step_ms)
        self.now_s += step_ms / 1e3
        return super()._note_plan(plan)

    def ask(self, name: str, num_prompt: int, max_tokens: int, tps: Any = None) -> None:
        extra = {} if tps is None else {"extra": {"extra_args": {KEY: tps}}}
        self.submit(name, words(sum(map(ord, name)), num_prompt), max_tokens, **extra)

    def pace(self) -> dict[str, float]:
        return self.harness.scheduler.pace()

    def longest_of(self, ticks: int) -> float:
        """The longest step of the next ticks."""
        self.longest_ms = 0.0
        self.ticks(ticks)
        return self.longest_ms

    def mean_of(self, ticks: int) -> float:
        """Milliseconds from token to token in the next ticks."""
        begin_s = self.now_s
        self.ticks(ticks)
        return (self.now_s - begin_s) * 1e3 / ticks


ROOM = Knobs(num_blocks=2000, budget_tokens=256, max_num_seqs=64, max_model_len=1000)


def test_the_first_request_with_a_rate_switches_the_measuring_on_and_keeps_its_rate() -> None:
    run = Paced(ROOM)
    run.ask("plain", 8, 300)
    run.ticks(20)
    assert run.pace()["learnt_steps"] == 0
    run.ask("user", 8, 300, tps=70)
    run.ticks(60)
    assert run.pace()["learnt_steps"] > 40
    run.ask("long", 600, 4)
    assert run.longest_of(40) < 2 * 1e3 / 70
    run.finish()


def test_a_rate_of_zero_binds_nobody() -> None:
    run = Paced(ROOM, target_tps_per_user=70.0)
    run.ask("patient", 8, 300, tps=0)
    run.ticks(60)
    run.ask("long", 600, 4, tps=0)
    assert run.longest_of(10) > 100, "nobody in the step has a rate, so the prompt takes the whole budget"
    run.ask("user", 8, 300)
    run.ticks(30)
    run.ask("later", 600, 4, tps=0)
    assert run.longest_of(40) < 2 * 1e3 / 70, "one user who has a rate keeps it"
    run.finish()


def test_the_shortest_period_in_a_step_binds() -> None:
    run = Paced(ROOM, target_tps_per_user=20.0)
    run.ask("slow", 8, 600)
    run.ask("first", 100, 4)  # what a prompt costs is known from then on
    run.ticks(60)
    run.ask("long", 600, 4)
    assert 1e3 / 70 < run.longest_of(40) <= 2 * 1e3 / 20
    run.ask("fast", 8, 400, tps=100)
    run.ticks(40)
    run.ask("longer", 600, 4)
    assert run.longest_of(40) < 2 * 1e3 / 100
    run.finish()


def test_a_rate_that_is_out_of_reach_binds_nobody_and_the_others_keep_theirs() -> None:
    run = Paced(ROOM, target_tps_per_user=70.0)
    run.ask("greedy", 8, 400, tps=9000)
    run.ask("user", 8, 400)
    run.ticks(60)
    run.ask("long", 600, 4)
    assert 4 < run.longest_of(40) < 2 * 1e3 / 70
    assert run.pace()["shed_requests"] == 0
    run.finish()


@pytest.mark.parametrize("value", [-1, "fast", True, 1e9, [70]])
def test_a_bad_rate_fails_that_request_alone(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = Paced(ROOM)
    run.ask("good", 8, 5, tps=70)
    run.ask("bad", 8, 5, tps=value)
    run.finish()
    assert run.outcome("good") == "length"
    assert run.outcome("bad") == "error"


def crowd(overload: str, **settings: Any) -> Paced:
    """Thirty users where a rate of 100 bears about fourteen; more than it takes to learn the device first."""
    run = Paced(ROOM, target_tps_per_user=100.0, target_overload=overload, **settings)
    for number in range(4):
        run.ask(f"early{number}", 8, 400)
    run.ticks(40)
    for number in range(26):
        run.ask(f"user{number}", 8, 100)
    run.ticks(60)
    return run


def test_above_capacity_requests_wait_in_order() -> None:
    run = crowd("queue")
    assert run.mean_of(20) < 1.02 * 1e3 / 100
    # Newcomers are gathered while there is room, and none is tried in between.
    assert run.pace()["held_admissions"] > 0
    started = [name for name in run.first_token if name.startswith("user")]
    assert started == [f"user{number}" for number in range(len(started))]
    assert 2 < len(started) < 26
    run.finish()
    assert {run.outcome(f"user{number}") for number in range(26)} == {"length"}


def test_above_capacity_requests_are_refused_when_asked_for() -> None:
    run = crowd("refuse")
    outcomes = [run.outcome(f"user{number}") for number in range(26)]
    assert outcomes.count("error") == run.pace()["refused_requests"] > 5
    assert "error" not in {run.outcome(f"early{number}") for number in range(4)}
    assert all(outcome is None or outcome in ("error", "length") for outcome in outcomes)
    assert run.harness.scheduler.get_num_unfinished_requests() < 20
    run.finish()


def test_above_capacity_everybody_runs_when_asked_for() -> None:
    run = crowd("degrade")
    assert run.pace()["degraded_admissions"] > 5
    assert run.pace()["held_admissions"] == run.pace()["shed_requests"] == 0
    run.ticks(40)
    assert len(run.first_token) == 30
    assert run.mean_of(10) > 1.3 * 1e3 / 100
    run.finish()


def test_users_without_a_rate_give_way_first() -> None:
    run = Paced(ROOM, target_tps_per_user=100.0)
    run.ask("guest", 8, 600, tps=0)
    for number in range(11):
        run.ask(f"user{number}", 8, 600)
    run.ticks(60)
    assert not run.preempted
    run.factor = 1.35
    run.ticks(40)
    assert next(iter(run.preempted)) == "guest"
    run.factor = 1.0
    run.finish()


@pytest.fixture
def plug() -> Iterator[Callable[[Any], None]]:
    plugged: list[Any] = []

    def register(plugin: Any) -> None:
        plugin_manager().register(plugin)
        plugged.append(plugin)

    yield register
    for plugin in plugged:
        plugin_manager().unregister(plugin)


def documented(name: str) -> Any:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names[name]()


CRAMPED = Knobs(groups=(Group(4),), num_blocks=40, max_num_seqs=8, max_model_len=200)


def preempted_first(run: Timeline) -> str:
    """Three users outgrow the pool; whoever is retracted for the others first."""
    run.submit("oldest", words(1, 8), 90)
    run.submit("middle", words(2, 8), 90)
    run.ticks(20)
    run.submit("young", words(3, 8), 90)
    while not run.preempted:
        run.tick()
    (name,) = run.preempted
    run.finish()
    return name


def test_the_documented_victim_choice_takes_the_place_of_ours(plug: Callable[[Any], None]) -> None:
    assert preempted_first(Timeline("tokenspeed", CRAMPED)) == "young"
    plug(documented("GentlePolicy"))
    assert preempted_first(Timeline("tokenspeed", CRAMPED)) == "middle"


def order_of_service() -> list[str]:
    run = Timeline("tokenspeed", Knobs(num_blocks=2000, max_num_seqs=1, max_model_len=4000, budget_tokens=4000))
    run.submit("running", words(1, 8), 20)
    run.ticks(2)
    run.submit("long", words(2, 3000), 2)
    run.submit("short", words(3, 8), 2)
    run.finish()
    return sorted(("long", "short"), key=run.first_token.__getitem__)


def test_the_documented_queue_order_takes_the_place_of_arrival(plug: Callable[[Any], None]) -> None:
    assert order_of_service() == ["long", "short"]
    plug(documented("GentlePolicy"))
    assert order_of_service() == ["short", "long"]


class Answers:
    """A plugin whose policies answer `answer`."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    @hookimpl
    def tokenspeed_victim_choice(self) -> Any:
        return lambda *_: self.answer

    @hookimpl
    def tokenspeed_queue_order(self) -> Any:
        return lambda arrival: self.answer if arrival.req_id == "bad" else 0.0


@pytest.mark.parametrize("answer", [-1, 8, None, 1.5])
def test_a_victim_choice_that_answers_nonsense_is_named(plug: Callable[[Any], None], answer: Any) -> None:
    plug(Answers(answer))
    with pytest.raises(ValueError, match=rf"the victim choice answered {re.escape(repr(answer))}; allowed: an index"):
        preempted_first(Timeline("tokenspeed", CRAMPED))


@pytest.mark.parametrize("answer", [None, "first", float("nan"), True])
def test_a_queue_order_that_answers_nonsense_fails_that_request(plug: Callable[[Any], None], answer: Any) -> None:
    plug(Answers(answer))
    run = Timeline("tokenspeed", CRAMPED)
    run.ledger.may_fail = True
    run.submit("good", words(1, 8), 2)
    run.submit("bad", words(2, 8), 2)
    run.finish()
    assert (run.outcome("good"), run.outcome("bad")) == ("length", "error")


def test_without_policies_nobody_is_asked() -> None:
    run = Timeline("tokenspeed", CRAMPED)
    assert run.scheduler._desk._order is None
