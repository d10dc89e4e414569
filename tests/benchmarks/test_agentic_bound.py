# SPDX-License-Identifier: Apache-2.0
"""What no schedule could exceed: the most output, and the least time per token; no run beats either."""

import json
import math
from dataclasses import replace

import msgspec
import pytest

from benchmarks.agentic.bound import StepDone, bound_of_steps, upper_bound
from benchmarks.agentic.records import TurnRecord, Window
from benchmarks.agentic.shaping import Shape, shaped, synthetic
from benchmarks.agentic.step_time import H200_DENSE_1B, StepShape, StepTimeModel
from benchmarks.agentic.tpot_bound import JudgedTurn, RunWork, least_p99_tpot_ms
from benchmarks.control.systems import load_factory

TIMES = StepTimeModel.load(H200_DENSE_1B, "ours")


def record(session, sent, first, last, tokens, **more):
    return TurnRecord(session, 0, sent, first, last, 100, tokens, **more)


def test_no_simulation_beats_the_bound():
    trace = shaped(synthetic(120, seed=6, num_turns=2), Shape(rate=1000.0, ramp_s=0.1, num_sessions=120))
    load_factory("ours")
    from benchmarks.agentic.simulated_engine import EngineSettings
    from benchmarks.agentic.simulation import Simulation, SimulationOptions

    settings = EngineSettings("ours", 20_000, budget_tokens=1024)
    result = Simulation(trace, settings, TIMES, SimulationOptions(30.0, warm_s=0.0)).run()
    assert len(result.records) == trace.num_turns
    decoding_s = sum(record.last_s - record.first_s for record in result.records)
    rate = sum(record.output_tokens - 1 for record in result.records) / decoding_s
    bound = upper_bound(trace, TIMES, rate)
    assert bound.tokens_per_s / 2 < result.figures()["tokens_per_s_per_gpu"] <= bound.tokens_per_s
    assert 0 < bound.prefill_share < 1


def step(begin_ms, end_ms, decode_ms, prompt_ms, tokens):
    return StepDone(end_ms / 1e3, begin_ms, end_ms, decode_ms, prompt_ms, tokens)


def test_the_bound_counts_the_work_of_the_window_and_the_least_steps():
    steps = [
        step(0, 990, 5, 5, 40),
        step(990, 1010, 15, 4, 40),
        step(1010, 1030, 5, 14, 10),
        step(1030, 3500, 9, 9, 50),
    ]
    turns = [record("a", 0.0, 1.0, 1.5, 51), record("b", 0.0, 1.2, 2.0, 81), record("slow", 0.0, 1.0, 2.9, 20)]
    bound = bound_of_steps(steps, turns, Window(1.0, 3.0), fixed_ms=1.0, target_tps=70.0)
    assert bound.per_token_ms == pytest.approx((15 + 4 + 5 + 14) / 50)
    # One second is covered by turns at the target: 35 steps at least.
    assert bound.tokens_per_s == pytest.approx((2000 - 35 * 1.0) / bound.per_token_ms / 2.0)
    assert bound.prefill_share == pytest.approx(bound.tokens_per_s * 18 / 50 / 1e3)
    nothing = bound_of_steps(steps, turns, Window(5.0, 6.0), 1.0, 70.0)
    assert (nothing.tokens_per_s, nothing.num_users) == (0.0, 0.0)


@pytest.mark.parametrize(("system", "target"), [("stock", 60.0), ("ours", 60.0), ("ours", 110.0)])
def test_no_run_beats_the_bound_of_its_own_work(system, target):
    trace = shaped(synthetic(60, seed=7, num_turns=3), Shape(rate=20.0, ramp_s=0.2, num_sessions=60))
    load_factory("ours")
    from benchmarks.agentic.simulated_engine import EngineSettings
    from benchmarks.agentic.simulation import Simulation, SimulationOptions

    # Steps that cost the host nothing: then a run can come close to what the device gives.
    times = idle_host(system)
    settings = EngineSettings(system, 20_000, target_tps=target if system == "ours" else 0.0)
    result = Simulation(trace, settings, times, SimulationOptions(6.0, 1.0, target)).run()
    found, bound = result.figures(), result.bound()
    assert found["goodput_per_gpu"] <= found["tokens_per_s_per_gpu"] <= bound.tokens_per_s
    assert found["tokens_per_s_per_gpu"] > 0.6 * bound.tokens_per_s
    # What the device did is all accounted for.
    inside = [one for one in result.steps if result.window.begin_s <= one.taken_s < result.window.end_s]
    busy_ms = sum(one.end_ms - one.begin_ms for one in inside)
    accounted_ms = sum(one.decode_ms + one.prompt_ms for one in inside) + len(inside) * result.fixed_ms
    assert busy_ms == pytest.approx(accounted_ms)
    assert sum(one.num_tokens for one in inside) == sum(result.num_inside)


def idle_host(system="ours"):
    """Step times of a machine whose host takes no time."""
    document = json.loads(H200_DENSE_1B.read_text())
    for cost in (*document["scheduler_ms"].values(), document["host_ms"]):
        cost.update({name: [0.0] * len(cost["rows"]) for name in cost if name not in ("rows", "mixed")})
    return replace(StepTimeModel.load(H200_DENSE_1B, system), data=msgspec.convert(document, type(TIMES.data)))


def test_turns_that_run_beside_each_other_all_the_time_reach_the_least_time_per_token():
    num_turns, num_gaps = 1000, 2000
    times = idle_host()
    # So many rows that leaving out one turn in a hundred says little, and contexts that hardly grow.
    step_ms = times.device_ms(StepShape(num_turns, num_turns * 101, 0, 0))
    work = RunWork(
        [JudgedTurn(100, num_gaps)] * num_turns,
        num_gaps * step_ms,
        num_gaps * (step_ms - times.device_ms(StepShape(0, 0, 0, 0))),
        num_turns,
        0.0,
    )
    assert 0.985 * step_ms < least_p99_tpot_ms(work, times) <= step_ms
    # Time without work allows more steps with fewer users; prompts take it away again.
    idle = work._replace(available_ms=2 * work.available_ms)
    assert least_p99_tpot_ms(idle, times) < 0.4 * step_ms
    prompts = idle._replace(device_work_ms=idle.device_work_ms + work.available_ms)
    assert least_p99_tpot_ms(prompts, times) == pytest.approx(least_p99_tpot_ms(work, times))
    assert math.isinf(least_p99_tpot_ms(work._replace(device_work_ms=work.available_ms), times))
    assert least_p99_tpot_ms(work._replace(turns=[]), times) == 0.0


def test_what_the_host_takes_bounds_the_time_per_token_too():
    times = StepTimeModel.load(H200_DENSE_1B, "stock")
    host_ms = sum(times.host(StepShape(256, 0, 0, 0)))
    work = RunWork([JudgedTurn(10, 1000)] * 256, 1000 * host_ms, 0.0, 256, 0.0)
    assert 0.8 * host_ms < least_p99_tpot_ms(work, times) <= host_ms


@pytest.mark.parametrize(
    ("system", "target", "host"), [("stock", 0.0, True), ("ours", 60.0, False), ("ours", 110.0, True)]
)
def test_no_run_is_below_the_least_time_per_token_of_its_own_work(system, target, host):
    trace = shaped(synthetic(60, seed=8, num_turns=3), Shape(rate=20.0, ramp_s=0.2, num_sessions=60))
    load_factory("ours")
    from benchmarks.agentic.simulated_engine import EngineSettings
    from benchmarks.agentic.simulation import Simulation, SimulationOptions

    times = StepTimeModel.load(H200_DENSE_1B, system) if host else idle_host(system)
    settings = EngineSettings(system, 20_000, target_tps=target)
    found = Simulation(trace, settings, times, SimulationOptions(6.0, 0.5, 60.0)).run().figures()
    assert 0.1 * found["tpot_ms_p99"] < found["least_tpot_ms_p99"] <= found["tpot_ms_p99"]
