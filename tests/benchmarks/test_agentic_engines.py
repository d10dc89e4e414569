# SPDX-License-Identifier: Apache-2.0
"""Sessions at an engine core's client, and the fit of a step model to measured steps."""

import json
import time
from types import SimpleNamespace

import pytest

from benchmarks.agentic import engine_replay
from benchmarks.agentic import step_shapes as step_shapes_module
from benchmarks.agentic.engine_bars import alone_bars, point_bars
from benchmarks.agentic.engine_replay import EngineReplay, forget_prefixes, sessions
from benchmarks.agentic.fit import ShortSteps, fit_device, host_of, write_step_model
from benchmarks.agentic.records import CUT
from benchmarks.agentic.shaping import Shape, shaped, synthetic
from benchmarks.agentic.step_shapes import reference_steps, returning_turns, step_shapes
from benchmarks.agentic.step_time import H200_DENSE_1B, StepShape, StepTimeModel
from benchmarks.agentic.stock_limits import TUNING_KEY


class Clock:
    """In the place of `time`: it moves when somebody sleeps, so other work on the machine changes nothing."""

    def __init__(self):
        self.now_s = 0.0

    def perf_counter(self):
        return self.now_s

    def time(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (engine_replay, step_shapes_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


class Core:
    """An engine core whose every step gives each request a token; prompts take no time unless `prompt_s` is given."""

    def __init__(self, step_s=0.001, prompt_s=0.0, clock=time):
        self._clock = clock
        self.open = {}
        self.sent = []
        self.aborted = []
        self.new_tokens = 0
        self.num_resets = 0
        self.extra_args = []
        self.step_s, self.prompt_s = step_s, prompt_s

    def add_request(self, request):
        self.sent.append((request.request_id, len(request.prompt_token_ids)))
        self.open[request.request_id] = request.sampling_params.max_tokens
        self.extra_args.append(request.sampling_params.extra_args)
        self.new_tokens += len(request.prompt_token_ids)

    def get_output(self):
        self._clock.sleep(self.step_s + self.prompt_s * self.new_tokens)
        self.new_tokens = 0
        outputs = []
        for request_id in list(self.open):
            self.open[request_id] -= 1
            finished = self.open[request_id] == 0
            stats = SimpleNamespace(num_cached_tokens=16)
            outputs.append(
                SimpleNamespace(request_id=request_id, new_token_ids=[1], finished=finished, prefill_stats=stats)
            )
            if finished:
                del self.open[request_id]
        return SimpleNamespace(outputs=outputs)

    def abort_requests(self, request_ids):
        self.aborted += request_ids
        for request_id in request_ids:
            del self.open[request_id]

    def reset_prefix_cache(self):
        self.num_resets += 1
        return not self.open and self.num_resets > 2


TRACE = shaped(synthetic(4, num_turns=3), Shape(rate=200.0, length=0.05, output_length=0.05))


def test_sessions_are_played_whole_and_in_turn():
    core = Core()
    replay = EngineReplay(core, TRACE.sessions, "x")
    replay.fill_cache()
    assert len(core.sent) == 4
    replay.run(30.0)
    by_turn = {(record.session, record.turn): record for record in replay.records}
    assert len(by_turn) == TRACE.num_turns
    for session in TRACE.sessions:
        for number, turn in enumerate(session.turns):
            record = by_turn[session.name, number]
            assert (record.output_tokens, record.cached_tokens, record.error) == (turn.output_tokens, 16, "")
            if number:
                assert record.sent_s >= by_turn[session.name, number - 1].last_s + turn.gap_s


def test_what_is_under_way_at_the_end_is_cut_and_aborted():
    core = Core(step_s=0.02)
    replay = EngineReplay(core, TRACE.sessions, "x")
    replay.run(0.15)
    cut = [record for record in replay.records if record.error]
    assert {record.error for record in cut} == {CUT}
    assert len(core.aborted) == len(cut) > 0
    assert core.open == {}


def test_steps_of_known_shapes_are_measured(clock):
    core = Core(step_s=0.002, prompt_s=2e-5, clock=clock)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))
    rows = step_shapes(llm, {"decodes": [[2, 30]], "prefills": [[0, 1000], [500, 250]], "stream": 7, "limits": None})[
        "rows"
    ]
    assert [(row["decodes"], row["prefill"], row["pairs"]) for row in rows] == [
        (2, 0, 0),
        (2, 1000, 500_000),
        (2, 250, 250 * 625),
    ]
    assert rows[0]["context"] > 60
    assert [row["ms"] for row in rows] == pytest.approx([2.0, 22.0, 17.0])
    assert core.open == {}
    assert all(extra == {"target_tps_per_user": 0} for extra in core.extra_args)


def measured_rows():
    truth = StepTimeModel.load(H200_DENSE_1B, "stock")
    shapes = [(n, n * c, p, p * c) for n in (16, 64, 128) for c in (1000, 8000, 16_000) for p in (0, 512, 2048)]
    return [
        {"decodes": n, "context": c, "prefill": p, "pairs": q, "ms": truth.device_ms(StepShape(n, c, p, q))}
        for n, c, p, q in shapes
    ]


def shape_of_row(row):
    return StepShape(row["decodes"], row["context"], row["prefill"], row["pairs"])


def test_the_fit_finds_the_device_behind_the_steps(tmp_path):
    found, error = fit_device(measured_rows(), lambda row: 3.0)
    assert error < 1e-6
    assert found == pytest.approx(
        {**json.loads(H200_DENSE_1B.read_text())["device"], "mixed_ms": 0.0, "eager_ms": 0.0}, rel=1e-3, abs=1e-6
    )
    path = tmp_path / "model.json"
    write_step_model(H200_DENSE_1B, path, measured_rows(), "a command")
    assert StepTimeModel.load(path, "ours").device_ms(StepShape(64, 90_000, 256, 10_000)) == pytest.approx(
        StepTimeModel.load(H200_DENSE_1B, "ours").device_ms(StepShape(64, 90_000, 256, 10_000)), rel=1e-3
    )
    assert "a command" in json.loads(path.read_text())["sources"]["device"]


def test_no_coefficient_is_negative_and_the_host_hides_nothing():
    rows = measured_rows()
    for row in rows:
        row["ms"] = max(0.5, row["ms"] - 2.5)  # as if the fixed cost were below zero
    found, _ = fit_device(rows, lambda row: 0.1)
    assert min(found.values()) == 0.0
    # Where the host rules nearly all of them, a step takes what it took.
    found, error = fit_device(measured_rows(), lambda row: 1e5)
    assert error < 1e-6
    with pytest.raises(ValueError, match=r"2 steps of a kind were measured; needed: 3"):
        fit_device(measured_rows()[:4], lambda row: 0.1)


def test_steps_that_say_how_fast_the_host_is_are_measured_within_the_limits_of_the_start(clock):
    core = Core(step_s=0.002, clock=clock)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))
    limits = {"max_num_seqs": 512, "budget_tokens": 8192, "long_prefill_tokens": 0}
    answer = reference_steps(llm, {"rows": 5, "context": 64, "stream": 7, "limits": limits})
    assert answer == {"ms": pytest.approx(2.0)}
    # A point before may have left stock with room for fewer than these rows.
    assert core.extra_args[0] == {TUNING_KEY: limits}
    assert [num_tokens for _, num_tokens in core.sent[1:]] == [64] * 5
    assert core.open == {}


def test_turns_of_a_session_come_back_to_all_that_was_said_before(clock):
    core = Core(prompt_s=1e-5, clock=clock)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))
    answer = returning_turns(llm, {"history": 500, "round": 1, "label": "alone"})
    lengths = [num_tokens for _, num_tokens in core.sent]
    assert lengths == [500, 756, 1076, 1396, 1716, 2036]
    assert len(answer["all_ttft_ms"]) == 5
    assert answer["cold_ttft_ms"] == pytest.approx(1 + 500 / 100)
    assert answer["all_ttft_ms"] == pytest.approx([1 + length / 100 for length in lengths[1:]])
    assert answer["tpot_ms"] == pytest.approx(1.0)
    assert core.open == {}


def test_a_point_begins_with_an_empty_cache_and_its_own_limits():
    core = Core()
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))
    shape = {"num_sessions": 2, "rate": 200.0, "length": 0.05, "output_length": 0.02, "most_turns": 2}
    limits = {"max_num_seqs": 3, "budget_tokens": 64, "long_prefill_tokens": 0}
    asked = {"trace": "synthetic", "shape": shape, "label": "x", "seconds": 20.0}
    answer = sessions(llm, {**asked, "limits": limits, "fill_limits": {**limits, "max_num_seqs": 9}})
    order = [name for name, _ in core.sent]
    assert order[:4] == ["x-fill-limits", "x-fill-0", "x-fill-1", "x-limits"]
    assert core.extra_args[0] == {TUNING_KEY: {**limits, "max_num_seqs": 9}}
    assert core.extra_args[3] == {TUNING_KEY: limits}
    assert core.num_resets == 3  # asked until it says that it is done
    assert len(answer["records"]) == 4
    assert sum(rows for _, rows, _ in answer["steps"]) == sum(record["output_tokens"] for record in answer["records"])
    assert sum(first for _, _, first in answer["steps"]) == 4
    assert answer["began_empty"]
    core.extra_args.clear()
    sessions(llm, {**asked, "limits": None, "fill_limits": None, "rate": 150.0})
    assert core.extra_args == [None] * 2 + [{"target_tps_per_user": 150.0}] * 4
    core.num_resets = -100
    assert not forget_prefixes(core, patience_s=0.1)


def test_the_runner_costs_what_short_steps_leave():
    base = StepTimeModel.load(H200_DENSE_1B, "stock")

    def short(system, runner_ms):
        costs = [StepTimeModel.load(H200_DENSE_1B, system).host(StepShape(n, 0, 0, 0)) for n in (16, 64)]
        return [
            {"decodes": n, "ms": cost.schedule_ms + cost.update_ms + runner_ms}
            for n, cost in zip((16, 64), costs, strict=True)
        ]

    # The device rules the steps of one of them: what is left is more than the runner.
    table = host_of(base, {"stock": ShortSteps(short("stock", 1.5)), "ours": ShortSteps(short("ours", 1.9))})
    assert (table["rows"], table["runner"]) == ([16, 64], pytest.approx([1.5, 1.5]))


def test_a_fitted_model_gives_back_every_systems_short_steps(tmp_path):
    """Schedulers, runner and what prompts cost the host come from steps with short contexts, where they rule."""
    truth = json.loads(H200_DENSE_1B.read_text())
    truth["scheduler_ms"]["stock"]["schedule"] = [0.7, 2.1, 8.2, 11.0]  # twice what the base says
    truth["host_ms"] |= {"mixed": 1.7, "eager": 2.5, "graph_tokens": 512}
    models = {system: StepTimeModel.of(truth, system) for system in ("stock", "ours")}

    def steady(system, shape):
        return models[system].steady_ms(shape)

    short = {}
    for system in models:
        short[system] = [
            {"decodes": n, "context": 0, "prefill": p, "pairs": 0, "ms": steady(system, StepShape(n, 0, p, 0))}
            for n in (16, 64, 256)
            for p in (0, 64, 600)
        ]
    path = tmp_path / "model.json"
    rows = [{**row, "ms": steady("ours", shape_of_row(row))} for row in measured_rows()]
    write_step_model(H200_DENSE_1B, path, rows, "a command", short)
    for system in models:
        fitted = StepTimeModel.load(path, system)
        for n in (16, 64, 100, 256):
            # A straight line over the number of rows stands for a table that is none.
            assert fitted.steady_ms(StepShape(n, 0, 0, 0)) == pytest.approx(
                steady(system, StepShape(n, 0, 0, 0)), rel=0.07
            )
            for tokens in (64, 600):
                mixed = StepShape(n, 0, tokens, 0)
                assert fitted.steady_ms(mixed) == pytest.approx(steady(system, mixed), rel=0.06)


def test_one_session_alone_is_judged_or_named_as_missing():
    def alone(ttft, tpot):
        return {length: {"ttft_ms": ttft, "cold_ttft_ms": 50.0, "tpot_ms": tpot} for length in ("1024", "65536")}

    outcomes = alone_bars({"stock": alone(40.0, 3.0), "ours": alone(38.0, 3.1)})
    found = {
        outcome.claim.partition(": ")[0].split(", ")[1] + outcome.claim.partition(": ")[2]: outcome
        for outcome in outcomes
    }
    assert found["1024 tokensTTFT of a returning turn, ours / stock"].met
    assert not found["65536 tokensTTFT of a returning turn, ours / stock"].met  # 5% is less than 9%
    assert found["65536 tokensTTFT of a new prompt, ours / stock"].met
    assert not found["65536 tokensTPOT, ours / stock"].met
    missing = alone_bars({"stock": alone(40.0, 3.0), "ours": {"error": "gone"}})
    assert not any(outcome.met for outcome in missing)
    assert "not measured with ours" in missing[0].note


def point(system, goodput, tpot, p95=75.0, **at):
    figures = {"num_sessions": 900, "tpot_ms_p99": tpot, "tps_p5": p95}
    return {"system": system, "goodput_at": {"70": goodput, **at}, **figures}


def test_time_per_token_is_judged_where_the_goodput_is_kept():
    points = {"stock": point("stock", 100.0, 14.0), "slow stock": point("stock", 0.0, 30.0, 50.0)}
    points |= {
        "ours": point("ours", 300.0, 12.0),
        "asked": point("ours", 200.0, 6.5),
        "more": point("ours", 120.0, 5.0),
    }
    goodput, tpot = point_bars(points.values(), 70.0)
    assert (goodput.measured, tpot.measured) == (3.0, pytest.approx(6.5 / 14))
    assert goodput.met
    assert tpot.met
    del points["asked"]
    assert not point_bars(points.values(), 70.0)[1].met
    del points["stock"]
    assert "stock keeps 70 tokens/s" in point_bars(points.values(), 70.0)[0].note


def test_a_target_is_judged_by_the_tunings_that_keep_it():
    """At 100 another tuning of stock is the best one, and the bar of the goodput is another."""
    points = [
        point("stock", 200.0, 14.0, p95=71.0, **{"100": 50.0}),
        point("stock", 150.0, 9.0, p95=105.0, **{"100": 140.0}),
        point("ours", 300.0, 13.0, p95=72.0, **{"100": 90.0}),
        point("ours", 250.0, 6.0, p95=130.0, **{"100": 250.0}),
    ]
    at_70, at_100 = (point_bars(points, target) for target in (70.0, 100.0))
    assert [bar.measured for bar in at_70] == [1.5, pytest.approx(13.0 / 14.0)]
    assert [bar.limit for bar in at_70] == [1.3, 0.5]
    assert [bar.measured for bar in at_100] == [pytest.approx(250 / 140), pytest.approx(6 / 9)]
    assert [bar.limit for bar in at_100] == [1.2, 0.5]


def test_the_command_that_is_kept_names_no_place_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.agentic.options import command_line

    monkeypatch.setattr("sys.argv", ["/some/where/__main__.py", "engines", "--out", "/some/where", "--loads", "420"])
    assert command_line() == "python -m benchmarks.agentic engines --loads 420"
