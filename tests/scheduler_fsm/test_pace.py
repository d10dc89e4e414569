# SPDX-License-Identifier: Apache-2.0
"""A rate per user on the exact worker: not one token changes, off is off, and other distributions may choose the chunk."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
from exact.driver import Driver
from exact.random_workload import Traffic, random_knobs, random_workload
from exact.workload import Arrival, Workload, words
from scheduler_harness import OURS, Knobs, make_harness

from tokenspeed_plugin.hooks.plugin_manager import plugin_manager

pytestmark = pytest.mark.host_matrix

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "pacing.md"


class Device:
    """A virtual clock: a step takes 2 ms, and 0.5 ms for every token beyond one per request."""

    def __init__(self):
        self.now_s = 0.0
        self.plans = []
        self.steps_ms = []

    def run(self, plan):
        tokens = plan.num_scheduled_tokens
        self.steps_ms.append(2 + 0.5 * sum(count - 1 for count in tokens.values()) if tokens else 0)
        self.now_s += self.steps_ms[-1] / 1e3
        cached = plan.scheduled_cached_reqs
        new = [(row.req_id, row.block_ids, row.num_computed_tokens) for row in plan.scheduled_new_reqs]
        rows = list(zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True))
        self.plans.append((dict(tokens), new, rows, sorted(plan.preempted_req_ids or ())))
        return plan


def drive(knobs, workload, target_tps):
    """Runs the workload to its end, every token compared with the truth; returns the device and what the pace did."""
    # The other eviction policy reads a real clock, so that two runs would not evict alike.
    settings = {"kv_eviction": "lru"} | ({} if target_tps is None else {"target_tps_per_user": target_tps})
    harness = make_harness(OURS, replace(knobs, additional_config={"tokenspeed": settings}))
    device = Device()
    harness.scheduler.use_clock(lambda: device.now_s)
    Driver(harness, workload, wrap_plan=device.run).run(max_ticks=20_000)
    return device, harness.scheduler.pace()


def traffic(seed, depth):
    shape = Knobs(pipeline_depth=depth, runner="v2" if seed % 2 else "v1")
    workload = random_workload(seed, Traffic(num_sessions=16, max_new=60, max_output=40), shape.max_model_len)
    return random_knobs(seed, shape, workload), workload


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(40, 52))
def test_no_token_changes_and_everybody_ends_under_any_target(seed, depth):
    knobs, workload = traffic(seed, depth)
    for target_tps in (400.0, 150.0):  # periods of 2.4 and 6.4 ms: hardly more than a decode, and a dozen prompt tokens
        _, pace = drive(knobs, workload, target_tps)
        assert pace["learnt_steps"] > 0


def test_a_target_limits_what_it_should():
    limited = [drive(*traffic(seed, 2), 150.0)[1]["limited_steps"] for seed in range(40, 46)]
    assert sum(limited) > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(60, 66))
def test_off_and_a_target_that_is_always_met_plan_alike(seed, depth):
    knobs, workload = traffic(seed, depth)
    without, pace = drive(knobs, workload, None)
    assert pace["learnt_steps"] == 0
    off, pace = drive(knobs, workload, 0)
    assert pace["learnt_steps"] == 0
    easy, pace = drive(knobs, workload, 0.001)
    assert pace["learnt_steps"] > 0
    assert without.plans == off.plans == easy.plans


def users_and_a_long_prompt(num_prompt=400):
    users = [Arrival(tick=0, request_id=f"user{i}", prompt=words(i, 8), max_tokens=400) for i in range(4)]
    late = Arrival(tick=60, request_id="long", prompt=words(99, num_prompt), max_tokens=4)
    return Knobs(num_blocks=1000, budget_tokens=256, max_model_len=1000), Workload([*users, late], [], 1)


def longest_step_ms(device):
    with_long = [ms for ms, plan in zip(device.steps_ms, device.plans, strict=True) if "long" in plan[0]]
    return max(with_long)


def test_users_keep_their_rate_beside_a_long_prompt():
    unlimited, _ = drive(*users_and_a_long_prompt(), 0)
    assert longest_step_ms(unlimited) > 100
    limited, pace = drive(*users_and_a_long_prompt(), 70.0)
    assert longest_step_ms(limited) < 2 * 1e3 / 70
    assert pace["relative_error"] < 0.2
    assert pace["target_period_ms"] == pytest.approx(0.96 * 1e3 / 70)


@pytest.fixture
def documented():
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    plugin = names["GentlePolicy"]()
    plugin_manager().register(plugin)
    yield names
    plugin_manager().unregister(plugin)


def test_the_documented_chunk_budget_takes_the_place_of_ours(documented):
    device, _ = drive(*users_and_a_long_prompt(600), 10.0)
    chunks = [plan[0]["long"] for plan in device.plans if "long" in plan[0] and plan[0]["long"] > 1]
    assert len(chunks) > 2
    assert all(chunk % 64 == 0 or chunk <= 16 for chunk in chunks[:-1])


@pytest.mark.parametrize("answer", [-1, "many", None, 2.5])
def test_a_chunk_budget_that_answers_nonsense_is_named(answer):
    config = {"tokenspeed": {"target_tps_per_user": 70}}
    knobs, workload = users_and_a_long_prompt()
    harness = make_harness(OURS, replace(knobs, additional_config=config))
    harness.scheduler._core.set_chunk_budget(lambda _: answer)
    with pytest.raises(ValueError, match=f"the chunk budget answered {re.escape(repr(answer))}; allowed: a number of"):
        Driver(harness, workload).run()


def test_what_was_measured_is_logged_once_a_minute():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("vllm.tokenspeed_plugin.scheduler_fsm.pace")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        knobs, workload = users_and_a_long_prompt()
        harness = make_harness(OURS, replace(knobs, additional_config={"tokenspeed": {"target_tps_per_user": 70}}))
        now = iter(range(0, 10**9, 7))
        harness.scheduler.use_clock(lambda: float(next(now)))
        Driver(harness, workload).run()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert len(lines) > 3
    assert all(line.startswith("Pace: target_period_ms") and "relative_error" in line for line in lines)
