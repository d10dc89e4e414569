# SPDX-License-Identifier: Apache-2.0
"""Sessions on a virtual clock: closed loop, whole answers, times that add up; figures; the step-time model."""

import json
import math

import pytest

from benchmarks.agentic.bound import Bound
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


def test_a_step_with_prompts_runs_while_it_is_launched():
    trace = shaped(synthetic(1, num_turns=1), Shape())
    for mixed_ms in (0.0, 40.0):
        document = json.loads(H200_DENSE_1B.read_text())
        document["host_ms"]["mixed"] = mixed_ms
        times = StepTimeModel.of(document, "ours")
        load_factory("ours")
        from benchmarks.agentic.simulated_engine import EngineSettings
        from benchmarks.agentic.simulation import Simulation, SimulationOptions

        (record,) = Simulation(trace, EngineSettings("ours", 2000), times, SimulationOptions(30.0, 0.0)).run().records
        new = record.prompt_tokens - record.cached_tokens
        prompt = StepShape(0, 0, new, new * (record.cached_tokens + record.prompt_tokens) // 2)
        first, second = times.host(prompt), times.host(StepShape(1, record.prompt_tokens + 1, 0, 0))
        # The next step is planned and launched before the first one's results are taken in.
        launched_ms = first.runner_ms + second.schedule_ms + second.runner_ms
        ttft_ms = first.schedule_ms + max(times.device_ms(prompt), launched_ms) + first.update_ms
        assert record.ttft_s * 1e3 == pytest.approx(ttft_ms, rel=0.02)


def test_the_simulated_engine_has_the_graphs_that_vllm_would_capture():
    document = json.loads(H200_DENSE_1B.read_text())
    assert StepTimeModel.of(document, "ours").graph_sizes() == []
    document["host_ms"]["graph_tokens"] = 512
    sizes = StepTimeModel.of(document, "ours").graph_sizes()
    assert (sizes[:5], sizes[-1], len(sizes)) == ([1, 2, 4, 8, 16], 512, 51)


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


def test_a_rate_counts_where_its_first_token_came():
    waited = [record(f"s{i}", -9.0, 1.0, 2.0, 101) for i in range(3)]
    late = record("late", 0.5, 4.5, 5.0, 101)
    result = figures([*waited, late], Window(0.0, 4.0), target_tps=70.0)
    assert (result["turns"], result["tps_p50"], result["met_share"]) == (1, 100.0, 1.0)
    assert result["ttft_ms_p50"] == 4000.0


def test_records_survive_a_file_and_a_bad_line_is_named(tmp_path):
    path = tmp_path / "turns.jsonl"
    written = [record("a", 0.0, 1.0, 2.0, 5), record("b", 0.0, 1.0, 2.0, 5, error="gone")]
    write_records(path, {"system": "ours"}, written)
    assert read_records(path)[:2] == ({"system": "ours"}, written)
    path.write_bytes(path.read_bytes() + b'{"kind": "turn", "session": 3}\n')
    with pytest.raises(ValueError, match=r"turns.jsonl, line 4: .*session"):
        read_records(path)


def result_of(system, load, rate, goodput, tpot=10.0, least=1.0):
    point = Point(Tuning(system), load)
    figures = {"tps_p5": rate, "goodput_per_gpu": goodput, "tpot_ms_p99": tpot, "least_tpot_ms_p99": least}
    return PointResult(point, figures, [], Window(0, 1))


def test_the_best_point_keeps_the_target():
    results = [result_of("stock", 10, 90, 100), result_of("stock", 20, 71, 180), result_of("stock", 30, 60, 250)]
    assert best(results, "stock", 70.0) is results[1]
    assert best(results, "ours", 70.0) is None
    told, untold = result_of("ours", 10, 80, 100), result_of("ours", 10, 80, 120)
    untold.point = Point(Tuning("ours", knows_graphs=False), 10)
    assert best([told, untold], "ours", 70.0) is told


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


def test_time_per_token_is_that_of_the_rate_asked_for_that_keeps_the_goodput():
    results = [
        result_of("stock", 30, 71, 100, tpot=14.0),
        result_of("ours", 30, 71, 190, tpot=13.0),
        result_of("ours", 30, 140, 140, tpot=6.8),
        result_of("ours", 30, 150, 120, tpot=6.0),  # too little goodput
        result_of("ours", 20, 160, 200, tpot=5.0),  # another load
    ]
    _, tpot = bars(results, {"stock": results[0], "ours": results[1]}, bound_of(1000.0), 70.0)
    assert (tpot.measured, tpot.met) == (pytest.approx(6.8 / 14.0), True)


def test_a_bar_above_the_bound_becomes_a_share_of_the_bound():
    results = [result_of("stock", 20, 71, 3800, tpot=14.0), result_of("ours", 20, 71, 3600, tpot=14.0)]
    chosen = {"stock": results[0], "ours": results[1]}
    goodput, tpot = bars(results, chosen, bound_of(3900.0), 70.0)
    assert goodput.limit == pytest.approx(0.9 * 3900 / 3800)
    assert goodput.met
    assert "the bound is 1.03, below 1.3: 90% of it" in goodput.claim
    assert tpot.limit == 0.5
    results = [results[0], result_of("ours", 20, 71, 3600, tpot=13.0, least=9.8)]
    _, tpot = bars(results, {**chosen, "ours": results[1]}, bound_of(3900.0), 70.0)
    assert (tpot.measured, tpot.limit) == (pytest.approx(13.0 / 14.0), pytest.approx(9.8 / 14.0 / 0.9))
    assert "the bound is 0.70, above 0.5: 90% of it" in tpot.claim
    assert not bars(results, {**chosen, "ours": result_of("ours", 20, 71, 3000)}, bound_of(3900.0), 70.0)[0].met


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
