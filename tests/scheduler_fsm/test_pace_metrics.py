# SPDX-License-Identifier: Apache-2.0
"""Rates per user at `/metrics`: what happens in the scheduler stands in the real Prometheus registry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from exact.watched import WatchedTimeline
from exact.workload import words
from scheduler_knobs import Knobs
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from tokenspeed_plugin.entry_points.pace_stats import PaceStatLogger
from tokenspeed_plugin.entry_points.stats import KvCacheStatLogger
from tokenspeed_plugin.scheduler_fsm import pace_report

pytestmark = pytest.mark.host_matrix

ROOM = Knobs(num_blocks=2000, budget_tokens=256, max_num_seqs=64, max_model_len=1000)


class Watched(WatchedTimeline):
    """Every report goes through the manager that vLLM's engines have. A step takes 2 ms and 0.5 ms for every token."""

    prefix = "vllm:tokenspeed_pace_"

    def __init__(self, **settings: Any) -> None:
        knobs = replace(ROOM, additional_config={"tokenspeed": {"kv_eviction": "lru", **settings}})
        super().__init__("tokenspeed", knobs, [KvCacheStatLogger, PaceStatLogger])
        self.ledger.may_fail = True
        self.now_s, self.factor = 0.0, 1.0
        self.harness.scheduler.use_clock(lambda: self.now_s)

    def _note_plan(self, plan: Any) -> Any:
        counts = plan.num_scheduled_tokens.values()
        self.now_s += self.factor * (2 + 0.5 * sum(counts)) / 1e3
        return super()._note_plan(plan)

    def users(self, count: int, max_tokens: int = 200, **extra: Any) -> None:
        for _ in range(count):
            name = f"user{len(self.ledger.accounts)}"
            fields = {"extra": {"extra_args": extra}} if extra else {}
            self.submit(name, words(len(self.ledger.accounts), 8), max_tokens, **fields)


@pytest.fixture(autouse=True)
def every_step_is_reported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pace_report, "PERIOD_S", 0.0)
    yield
    unregister_vllm_metrics()


def test_steps_stand_under_their_shape_with_what_the_model_said_of_them() -> None:
    run = Watched(target_tps_per_user=70.0)
    run.users(4)
    run.ticks(60)
    decodes = {"decodes": "1-8", "prompt_tokens": "0"}
    steps = run.value("steps_total", **decodes)
    assert steps is not None
    assert 50 < steps <= 60
    measured = run.value("measured_seconds_total", **decodes)
    assert measured == pytest.approx(steps * 4e-3, rel=0.01)
    predicted, error = run.value("predicted_seconds_total", **decodes), run.value("error_seconds_total", **decodes)
    assert predicted is not None
    assert error is not None
    assert abs(predicted - measured) <= error < 0.3 * measured
    run.submit("long", words(99, 700), 2)
    run.ticks(20)
    assert run.value("steps_total", decodes="1-8", prompt_tokens="1-512")
    pace = run.scheduler.pace()
    assert run.value("chunk_tokens") == pace["chunk_tokens"] > 0
    assert run.value("limited_steps_total") == pace["limited_steps"] > 0


def test_users_who_are_behind_are_counted() -> None:
    run = Watched(target_tps_per_user=70.0, target_overload="degrade")  # nobody is retracted for it
    run.users(4)
    run.ticks(20)
    assert run.value("users_below_target") == 0
    run.factor = 5.0  # 20 ms where a token is due every 13.7, after twenty of 4
    run.ticks(120)
    assert run.value("users_below_target") == 4


def test_admissions_held_back_and_retractions_are_counted() -> None:
    run = Watched(target_tps_per_user=100.0)
    run.users(12)
    run.ticks(60)
    assert (run.value("held_admissions_total"), run.value("shed_requests_total")) == (0, 0)
    run.users(8)
    run.ticks(60)
    assert run.value("held_admissions_total") == run.scheduler.pace()["held_admissions"] > 0
    run.factor = 1.5
    run.ticks(40)
    assert run.value("shed_requests_total") == run.scheduler.pace()["shed_requests"] > 0


@pytest.mark.parametrize(("overload", "name"), [("refuse", "refused_requests"), ("degrade", "degraded_admissions")])
def test_what_happens_above_capacity_is_counted(overload: str, name: str) -> None:
    run = Watched(target_tps_per_user=100.0, target_overload=overload)
    run.users(4)
    run.ticks(40)
    run.users(20)
    run.ticks(60)
    assert run.value(f"{name}_total") == run.scheduler.pace()[name] > 0


def test_without_a_rate_nothing_is_shown_and_the_first_request_with_one_shows_it() -> None:
    run = Watched()
    run.users(2)
    run.ticks(10)
    assert run.value("limited_steps_total") is None
    run.users(1, target_tps_per_user=70)
    run.ticks(20)
    assert run.value("limited_steps_total") == 0
    assert run.value("steps_total", decodes="1-8", prompt_tokens="0")


def test_nothing_of_it_reaches_the_loggers_of_vllm() -> None:
    run = Watched(target_tps_per_user=70.0)
    run.users(2)
    run.ticks(10)
    assert run.left_over
    assert all(not left for left in run.left_over)
    run.manager.log()


def test_a_step_in_between_costs_one_look_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace_report, "PERIOD_S", 3600.0)
    run = Watched(target_tps_per_user=70.0)
    report = run.scheduler._statistics._pace
    run.users(2)
    run.ticks(3)
    report._core = type("Busy", (), {"num_running": 1})()  # any other question would fail
    run.ticks(10)
