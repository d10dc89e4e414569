# SPDX-License-Identifier: Apache-2.0
"""Sessions on a virtual clock: closed loop, whole answers, times that add up; figures; the step-time model."""

import json
import math
from dataclasses import replace

import msgspec
import pytest

from benchmarks.agentic.bound import Bound, StepDone, bound_of_steps, upper_bound
from benchmarks.agentic.goodput_bars import bars
from benchmarks.agentic.records import TurnRecord, Window, figures, read_records, write_records
from benchmarks.agentic.shaping import Shape, shaped, synthetic
from benchmarks.agentic.step_time import H200_DENSE_1B, StepModelError, StepShape, StepTimeModel
from benchmarks.agentic.sweep import Point, PointResult, Tuning, best, most_promising, stock_tunings
from benchmarks.control.systems import load_factory

TRACE = shaped(synthetic(5, seed=4, num_turns=4), Shape(rate=10.0))
TIMES = StepTimeModel.load(H200_DENSE_1B, "ours")


def simulate(system, trace=TRACE, seconds=30.0, **settings):
    load_factory("ours")
    from benchmarks.agentic.simulated_engine import EngineSettings
    from benchmarks.agentic.simulation import Simulation, SimulationOptions

    engine = EngineSettings(system, **{"num_blocks": 2000, **settings})
    times = StepTimeModel.load(H200_DENSE_1B, system)
    return Simulation(trace, engine, times, SimulationOptions(seconds, warm_s=0.0)).run()


@pytest.mark.parametrize("system", ["stock", "ours"])
@pytest.mark.parametrize("depth", [1, 2])
def test_every_turn_comes_after_its_wait_and_whole(system, depth):
    result = simulate(system, depth=depth)
    by_turn = {(record.session, record.turn): record for record in result.records}
    assert len(by_turn) == TRACE.num_turns
    for session in TRACE.sessions:
        for number, turn in enumerate(session.turns):
            record = by_turn[session.name, number]
            assert record.output_tokens == turn.output_tokens
            assert record.sent_s < record.first_s <= record.last_s
            assert record.cached_tokens > 0
            if number:
                assert record.sent_s == by_turn[session.name, number - 1].last_s + turn.gap_s
    assert result.figures()["unfinished"] == 0


@pytest.mark.parametrize("system", ["stock", "ours"])
def test_a_pool_that_is_too_small_preempts_and_everybody_still_ends(system):
    trace = shaped(synthetic(8, seed=5, num_turns=1), Shape(rate=10.0, output_length=4.0))
    result = simulate(system, trace, seconds=120.0, num_blocks=190)
    assert result.figures()["preemptions"] > 0
    outputs = {session.name: session.turns[0].output_tokens for session in trace.sessions}
    assert {record.session: record.output_tokens for record in result.records} == outputs


def test_the_clock_runs_by_the_model():
    single = shaped(synthetic(1, num_turns=1), Shape())
    fast, slow = simulate("ours", single), simulate("ours", single, depth=1)
    times = StepTimeModel.load(H200_DENSE_1B, "ours")
    record = fast.records[0]
    decode = StepShape(1, record.prompt_tokens + record.output_tokens // 2, 0, 0)
    per_token_ms = (record.last_s - record.first_s) * 1e3 / (record.output_tokens - 1)
    assert per_token_ms == pytest.approx(times.steady_ms(decode), rel=0.02)
    host = times.host(decode)
    in_turn_ms = times.device_ms(decode) + host.schedule_ms + host.runner_ms + host.update_ms
    slow_record = slow.records[0]
    slow_ms = (slow_record.last_s - slow_record.first_s) * 1e3 / (slow_record.output_tokens - 1)
    assert slow_ms == pytest.approx(in_turn_ms, rel=0.02)


def test_host_costs_follow_the_table():
    times = StepTimeModel.load(H200_DENSE_1B, "stock")
    assert times.host(StepShape(256, 0, 0, 0)).schedule_ms == 4.11
    assert times.host(StepShape(1, 0, 0, 0)).schedule_ms == 0.35
    assert times.host(StepShape(384, 0, 0, 0)).update_ms == pytest.approx((2.38 + 3.42) / 2 + 0.4)
    assert times.host(StepShape(1024, 0, 0, 0)).schedule_ms == pytest.approx(5.57 + 2 * (5.57 - 4.11))
    assert times.scaled(2.0).device_ms(StepShape(8, 100, 5, 9)) == 2 * times.device_ms(StepShape(8, 100, 5, 9))


def test_a_step_model_that_is_malformed_is_named(tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**json.loads(H200_DENSE_1B.read_text()), "device": {"fixed_ms": "fast"}}))
    with pytest.raises(StepModelError, match=r"model.json: .*float.*device.fixed_ms"):
        StepTimeModel.load(path, "ours")
    with pytest.raises(StepModelError, match=r"no scheduler_ms for 'other'; allowed: \['ours', 'stock'\]"):
        StepTimeModel.load(H200_DENSE_1B, "other")


def test_no_simulation_beats_the_bound():
    trace = shaped(synthetic(120, seed=6, num_turns=2), Shape(rate=1000.0, ramp_s=0.1, num_sessions=120))
    result = simulate("ours", trace, num_blocks=20_000, budget_tokens=1024)
    assert len(result.records) == trace.num_turns
    decoding_s = sum(record.last_s - record.first_s for record in result.records)
    rate = sum(record.output_tokens - 1 for record in result.records) / decoding_s
    bound = upper_bound(trace, TIMES, rate)
    assert bound.tokens_per_s / 2 < result.figures()["tokens_per_s_per_gpu"] <= bound.tokens_per_s
    assert 0 < bound.prefill_share < 1


def record(session, sent, first, last, tokens, **more):
    return TurnRecord(session, 0, sent, first, last, 100, tokens, **more)


def test_goodput_counts_turns_at_the_target_alone():
    records = [
        record("fast", 0.0, 1.0, 2.0, 101, cached_tokens=50),  # 100 tokens/s
        record("slow", 0.0, 1.0, 3.0, 101, cached_tokens=0),  # 50
        record("early", -5.0, -4.0, -3.0, 101),
        record("broken", 0.5, 1.0, 2.0, 11, error="status 500"),
        record("one token", 0.5, 1.0, 1.0, 1),
    ]
    result = figures(records, Window(0.0, 4.0), target_tps=70.0, num_gpus=2)
    assert (result["turns"], result["failed"]) == (4, 1)
    assert result["goodput_per_gpu"] == pytest.approx(101 / 4 / 2)
    assert result["met_share"] == 0.5
    assert result["hit_rate"] == 0.25
    assert result["ttft_ms_p50"] == 1000.0
    assert result["tpot_ms_p50"] == pytest.approx((10.0 + 20.0) / 2)
    assert math.isnan(figures([], Window(0.0, 1.0), 70.0)["tps_p50"])


def test_records_survive_a_file_and_a_bad_line_is_named(tmp_path):
    path = tmp_path / "turns.jsonl"
    written = [record("a", 0.0, 1.0, 2.0, 5), record("b", 0.0, 1.0, 2.0, 5, error="gone")]
    write_records(path, {"system": "ours"}, written)
    assert read_records(path)[:2] == ({"system": "ours"}, written)
    path.write_bytes(path.read_bytes() + b'{"kind": "turn", "session": 3}\n')
    with pytest.raises(ValueError, match=r"turns.jsonl, line 4: .*session"):
        read_records(path)


def result_of(system, load, rate, goodput, tpot=10.0):
    point = Point(Tuning(system), load)
    figures = {"tps_p5": rate, "goodput_per_gpu": goodput, "tpot_ms_p99": tpot, "tokens_per_s_per_gpu": goodput}
    return PointResult(point, figures, [], Window(0, 1))


def test_the_best_point_keeps_the_target():
    results = [result_of("stock", 10, 90, 100), result_of("stock", 20, 71, 180), result_of("stock", 30, 60, 250)]
    assert best(results, "stock", 70.0) is results[1]
    assert best(results, "ours", 70.0) is None


def bound_of(tokens_per_s, fixed_ms=1.0):
    """A bound of so many tokens per second at 70 per user."""
    per_token_ms = (1e3 / 70 - fixed_ms) / (tokens_per_s / 70)
    return Bound(tokens_per_s, tokens_per_s / 70, 0.3, fixed_ms, per_token_ms)


def test_bars_compare_at_the_same_load_and_miss_without_a_point():
    results = [
        result_of("stock", 20, 71, 100, tpot=14.0),
        result_of("stock", 30, 50, 50, tpot=40.0),
        result_of("ours", 30, 71, 150, tpot=14.0),
    ]
    chosen = {"stock": results[0], "ours": results[2]}
    goodput, tpot = bars(results, chosen, bound_of(1000.0), 70.0)
    assert (goodput.measured, goodput.limit, goodput.met) == (1.5, 1.3, True)
    assert (tpot.measured, tpot.limit, tpot.met) == (14.0 / 40.0, 0.5, True)
    for missing in ("stock", "ours"):
        unmet = bars(results, {**chosen, missing: None}, bound_of(1000.0), 70.0)
        assert [outcome.met for outcome in unmet] == [False, False]
        assert f"no point of {missing}" in unmet[0].note


def test_a_bar_above_the_bound_becomes_a_share_of_the_bound():
    results = [result_of("stock", 20, 71, 3800, tpot=14.0), result_of("ours", 20, 71, 3600, tpot=14.0)]
    chosen = {"stock": results[0], "ours": results[1]}
    goodput, tpot = bars(results, chosen, bound_of(3900.0), 70.0)
    assert goodput.limit == pytest.approx(0.9 * 3900 / 3800)
    assert goodput.met
    assert "the bound is 1.03, below 1.3: 90% of it" in goodput.claim
    least_ms = bound_of(3900.0).least_tpot_ms(3600.0)
    assert least_ms == pytest.approx(1.0 / (1 - 3.6 * bound_of(3900.0).per_token_ms))
    assert tpot.limit == pytest.approx(least_ms / 14.0 / 0.9 if least_ms > 7 else 0.5)
    assert not bars(results, {**chosen, "ours": result_of("ours", 20, 71, 3000)}, bound_of(3900.0), 70.0)[0].met


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
    document = json.loads(H200_DENSE_1B.read_text())
    for cost in (*document["scheduler_ms"].values(), document["host_ms"]):
        cost.update({name: [0.0] * len(cost["rows"]) for name in cost if name not in ("rows", "mixed")})
    times = replace(StepTimeModel.load(H200_DENSE_1B, system), data=msgspec.convert(document, type(TIMES.data)))
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


def test_steps_that_are_alike_have_the_rate_that_the_throughput_leaves():
    fixed_ms, per_token_ms = 1.3, 0.2
    bound = Bound(0.0, 0.0, 0.0, fixed_ms, per_token_ms)
    num_users = (1e3 / 70 - fixed_ms) / per_token_ms
    assert bound.least_tpot_ms(num_users * 70) == pytest.approx(1e3 / 70)
    assert math.isinf(bound.least_tpot_ms(1.01e3 / per_token_ms))


def test_stock_is_tuned_by_every_setting():
    tunings = stock_tunings((256, 512), (64,), (0, 256))
    assert [t.name for t in tunings] == [
        "stock: tokens 256, seqs 64",
        "stock: tokens 512, seqs 64",
        "stock: tokens 512, seqs 64, long 256",
    ]


def test_tunings_that_keep_the_target_are_tried_longer():
    def of(budget, rate, goodput):
        return PointResult(
            Point(Tuning("stock", budget), 1), {"tps_p5": rate, "goodput_per_gpu": goodput}, [], Window(0, 1)
        )

    results = [of(256, 80, 100), of(512, 60, 300), of(1024, 75, 120), of(256, 60, 400), of(2048, 71, 90)]
    assert [tuning.budget_tokens for tuning in most_promising(results, 70.0, 3)] == [1024, 256, 2048]
    assert [tuning.budget_tokens for tuning in most_promising(results, 70.0, 9)] == [1024, 256, 2048, 512]
