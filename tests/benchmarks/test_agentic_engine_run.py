# SPDX-License-Identifier: Apache-2.0
"""Phases of `engines` in their order, what is left out when time is short, and the search of stock's limits."""

import contextlib
import json
import math
from types import SimpleNamespace

import msgspec
import pytest

from benchmarks.agentic import __main__ as command
from benchmarks.agentic import engine_run
from benchmarks.agentic.records import TurnRecord
from benchmarks.agentic.stock_limits import TUNING_KEY, StockLimits
from benchmarks.agentic.stock_search import StockSearch
from benchmarks.control.systems import load_factory
from benchmarks.control.vllm_plane import arriving_request, build_engine, greedy
from benchmarks.gpu.engine_client import EngineFailedError

MOST = StockLimits(512, 8192)


def stock_at(limits: StockLimits, small_budget_helps: float = 1.0) -> dict[str, float]:
    """Figures of a server whose step takes 2 ms and 40 us a request, under a load of 400."""
    rows = min(400, limits.max_num_seqs)
    rate = 1e3 / (2.0 + 0.04 * rows) * (small_budget_helps if limits.budget_tokens < 1024 else 1.0)
    return {"tps_p5": rate, "rows_mean": rows, "goodput_per_gpu": rows * rate if rate >= 70 else rows * rate / 4}


def searched(**options: float) -> StockSearch:
    search = StockSearch(70.0, MOST)
    while (limits := search.next()) is not None:
        assert len(search.tried) < 8
        search.note(limits, stock_at(limits, **options))
    return search


def test_the_search_finds_the_most_requests_that_keep_the_rate() -> None:
    search = searched()
    assert search.tried[0][0] == MOST
    # 14.28 ms are there, so 307 requests would do.
    assert 290 <= search.best().max_num_seqs <= 307
    assert stock_at(search.best())["tps_p5"] >= 70
    assert len(search.tried) <= 5
    last, _ = search.tried[-1]
    assert last.budget_tokens < 1024
    assert searched(small_budget_helps=1.05).best().budget_tokens < 1024


def test_where_no_turn_has_a_rate_the_steps_time_is_taken() -> None:
    search = StockSearch(70.0, MOST)
    # Whoever came in the try waited to its end: nobody's rate was measured.
    search.note(MOST, {"tps_p5": math.nan, "rows_mean": 510, "step_ms_mean": 43.0, "goodput_per_gpu": 0.0})
    following = search.next()
    assert following is not None
    assert 120 <= following.max_num_seqs <= 160


def test_a_load_that_needs_no_tuning_is_not_searched() -> None:
    search = StockSearch(70.0, MOST)
    search.note(MOST, {"tps_p5": 71.0, "rows_mean": 100, "goodput_per_gpu": 1.0})
    assert search.next() is None
    assert search.best() == MOST


def test_nothing_is_tried_twice_and_the_start_does_not_turn_the_search() -> None:
    search = StockSearch(70.0, MOST, begin=StockLimits(300, 2048))
    just_right = {"tps_p5": 70.0 * 1.01, "rows_mean": 300, "goodput_per_gpu": 21_000}
    search.note(StockLimits(300, 2048), just_right)
    # As many requests again as were just tried: a small budget is what is left.
    assert search.next() == StockLimits(300, 512)
    # Stock as it was started may be the best, but says nothing of where to go on.
    search.note(MOST, {"tps_p5": 80.0, "rows_mean": 400, "goodput_per_gpu": 32_000})
    assert search.next() == StockLimits(512, 768)
    assert search.best() == MOST
    search.note(StockLimits(512, 768), just_right)
    assert search.next() is None


def test_limits_come_with_a_request_and_bind_stock() -> None:
    load_factory("ours")
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import RequestStatus

    engine = build_engine("benchmarks.agentic.tunable_stock.TunableScheduler", 16, 200, 8, 512, 2, {}, {})

    def add(name: str, extra: dict[str, object] | None = None) -> None:
        sampling = greedy(4)
        sampling.extra_args = extra
        prompt = [sum(map(ord, name))] * 100  # nobody shares it
        request, _ = EngineCore.preprocess_add_request(engine, arriving_request(name, prompt, sampling))
        engine.scheduler.add_request(request)

    for number in range(3):
        add(f"free{number}")
    assert len(engine.scheduler.schedule().num_scheduled_tokens) == 3
    engine.scheduler.finish_requests([f"free{number}" for number in range(3)], RequestStatus.FINISHED_ABORTED)
    add("bound0", StockLimits(2, 150, 40).as_extra_args())
    for number in range(1, 4):
        add(f"bound{number}")
    planned = engine.scheduler.schedule().num_scheduled_tokens
    assert planned == {"bound0": 40, "bound1": 40}
    with pytest.raises(ValueError, match="max_num_seqs is 9; allowed: 1 to 8"):
        add("more", {TUNING_KEY: {"max_num_seqs": 9, "budget_tokens": 100}})


def test_a_search_may_begin_with_limits_that_are_known_to_be_good() -> None:
    search = StockSearch(70.0, MOST, begin=StockLimits(250, 2048))
    while (limits := search.next()) is not None:
        assert limits != MOST
        search.note(limits, stock_at(limits))
    assert search.tried[0][0] == StockLimits(250, 2048)
    # The first try kept the rate with room for more.
    assert 290 <= search.tried[1][0].max_num_seqs <= 312


class Engine:
    """An engine process that answers at once; `fails_at` is the command that kills it."""

    def __init__(self, system: str, calls: list[tuple[str, ...]], fails_at: str = "") -> None:
        self.description = {"num_blocks": 10_000, "block_tokens": 64}
        self._system, self._calls, self._fails_at = system, calls, fails_at
        self._dead = False

    def run(self, name: str, timeout_s: float, **arguments: object) -> dict[str, object]:
        assert timeout_s <= 1000
        self._calls.append((self._system, name, str(arguments.get("label", ""))))
        self._dead = self._dead or name == self._fails_at
        if self._dead:
            raise EngineFailedError(f"{self._system} ended")
        return getattr(self, name)(arguments)

    def returning_turns(self, arguments: dict[str, object]) -> dict[str, object]:
        return {"all_ttft_ms": [2.0, 3.0, 4.0], "all_tpot_ms": [1.0], "cold_ttft_ms": 9.0}

    def step_shapes(self, arguments: dict[str, object]) -> dict[str, object]:
        rows = [
            {"decodes": n, "context": n * c, "prefill": 0, "pairs": 0, "ms": 3.0 + n} for n, c in arguments["decodes"]
        ]
        return {"rows": rows + [{**row, "prefill": 64, "pairs": 2048, "ms": row["ms"] + 1} for row in rows]}

    def reference_steps(self, arguments: dict[str, object]) -> dict[str, object]:
        assert (arguments["limits"] is None) == (self._system == "ours")
        self._num_references = getattr(self, "_num_references", 0) + 1
        return {"ms": 8.0 + self._num_references}

    def sessions(self, arguments: dict[str, object]) -> dict[str, object]:
        seqs = (arguments["limits"] or {"max_num_seqs": 100})["max_num_seqs"]
        rate = (arguments["rate"] or 90.0) if self._system == "ours" else 70.0 * 300 / seqs
        records = [TurnRecord(f"s{i}", 0, 2.0, 2.5, 2.5 + 100 / rate, 50, 101) for i in range(20)]
        return {
            "records": msgspec.to_builtins(records),
            "steps": [[t / 10, seqs, 0] for t in range(60)],
            "fill_s": 1.0,
            "began_empty": True,
        }


def run(monkeypatch: pytest.MonkeyPatch, folder, calls, engines=None, seconds: float = 1000, more: tuple = ()) -> int:
    engines = engines or {system: Engine(system, calls) for system in ("stock", "ours")}

    @contextlib.contextmanager
    def built(entries, *_):
        assert [entry.budget_tokens for entry in entries] == [8192, 8192]
        yield engines

    monkeypatch.setattr(engine_run, "engines", built)
    monkeypatch.setattr(engine_run, "write_model", lambda model, folder: folder)
    arguments = ["engines", "--loads", "400", "100", "--seconds", "6", "--warm", "1", "--max-num-seqs", "512"]
    return command.main(
        [*arguments, "--total-seconds", str(seconds), "--max-model-len", "73728", "--out", str(folder), *more]
    )


def test_the_most_telling_points_come_first(monkeypatch, tmp_path) -> None:
    calls: list[tuple[str, ...]] = []
    assert run(monkeypatch, tmp_path, calls) == 0
    labels = [label if name == "sessions" else name for _, name, label in calls if name != "reference_steps"]
    order = [label for i, label in enumerate(labels) if label not in labels[:i]]
    assert order[:5] == ["ours400", "stock400-512-8192", "step_shapes", "returning_turns", "stock400-267-2048"]
    assert order.index("ours100") < order.index("stock100-267-2048")
    # Both orders of the systems, so that neither always comes first.
    assert [system for system, name, _ in calls if name == "returning_turns"] == ["stock"] * 2 + ["ours"] * 4 + [
        "stock"
    ] * 4 + ["ours"] * 4 + ["stock"] * 2
    found = json.loads((tmp_path / "engines.json").read_text())
    assert found["replays"]["stock seqs 267 tokens 2048, 400 sessions"]["max_num_seqs"] == 267
    assert found["alone"]["ours"]["65536"]["ttft_ms"] == 3.0
    assert found["engines"]["ours"]["num_blocks"] == 10_000
    assert (tmp_path / "ours400.jsonl").exists()
    assert len(json.loads((tmp_path / "ours400.steps.json").read_text())) == 60


def test_ours_plays_the_first_load_again_with_a_rate_that_requests_ask_for(monkeypatch, tmp_path) -> None:
    calls: list[tuple[str, ...]] = []
    run(monkeypatch, tmp_path, calls, more=["--rates", "0", "150", "--first-limits", "250", "2048"])
    labels = [label for _, name, label in calls if name == "sessions"]
    # A second try, what stock was started with, and a try for a target of 100: the search began elsewhere.
    assert labels[:6] == [
        "ours400",
        "stock400-250-2048",
        "ours400-asked150",
        "stock400-313-2048",
        "stock400-512-8192",
        "stock400-181-2048",
    ]
    found = json.loads((tmp_path / "engines.json").read_text())
    asked = found["replays"]["ours asked for 150, 400 sessions"]
    assert asked["tps_p50"] == pytest.approx(150, rel=0.02)
    assert (tmp_path / "ours400-asked150.jsonl").exists()


def test_every_point_has_steps_of_one_shape_on_both_sides(monkeypatch, tmp_path) -> None:
    calls: list[tuple[str, ...]] = []
    run(monkeypatch, tmp_path, calls)
    names = [f"{system} {name}" for system, name, _ in calls]
    assert names[:2] == ["stock reference_steps", "ours reference_steps"]
    assert names[2:5] == ["ours sessions", *names[:2]]
    found = json.loads((tmp_path / "engines.json").read_text())
    assert [one["stock"] for one in found["references"][:3]] == [9.0, 10.0, 11.0]
    # The mean of both sides, of both systems.
    assert found["replays"]["ours, 400 sessions"]["reference_ms"] == {"ours": 9.5, "stock": 9.5}
    assert found["replays"]["stock seqs 512 tokens 8192, 400 sessions"]["reference_ms"]["stock"] == 10.5
    assert found["shapes"]["reference_ms"]["stock"] == 11.5


def test_an_engine_that_dies_leaves_the_others_figures(monkeypatch, tmp_path) -> None:
    calls: list[tuple[str, ...]] = []
    engines = {"stock": Engine("stock", calls, fails_at="sessions"), "ours": Engine("ours", calls)}
    assert run(monkeypatch, tmp_path, calls, engines) == 0
    found = json.loads((tmp_path / "engines.json").read_text())
    assert "stock ended" in found["replays"]["stock seqs 512 tokens 8192, 400 sessions"]["error"]
    assert found["replays"]["ours, 100 sessions"]["tps_p5"] == pytest.approx(90, rel=0.01)
    assert "stock ended" in found["shapes"]["error"]


def test_what_does_not_fit_is_left_out_and_named(monkeypatch, tmp_path, capsys) -> None:
    calls: list[tuple[str, ...]] = []
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(engine_run.time, "monotonic", lambda: clock.now)

    class SlowEngine(Engine):
        def run(self, name, timeout_s, **arguments):
            clock.now += 30.0 if name != "reference_steps" else 0.0
            return super().run(name, timeout_s, **arguments)

    engines = {system: SlowEngine(system, calls) for system in ("stock", "ours")}
    run(monkeypatch, tmp_path, calls, engines, seconds=160)
    # Two points of 30 s each, shapes in three requests, then too little for one more point.
    names = [name for _, name, _ in calls if name != "reference_steps"]
    assert names == ["sessions", "sessions", "step_shapes", "step_shapes", "step_shapes"]
    said = capsys.readouterr().err
    assert "left out: ours, 100 sessions (4 s left, 10 needed)" in said
    assert "left out: one session alone (4 s left, 30 needed)" in said
    found = json.loads((tmp_path / "engines.json").read_text())
    assert list(found["replays"]) == ["ours, 400 sessions", "stock seqs 512 tokens 8192, 400 sessions"]


def test_a_trace_that_is_not_there_ends_the_run_before_engines_are_built(monkeypatch, tmp_path, capsys) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.delenv("TOKENSPEED_TRACES", raising=False)
    assert run(monkeypatch, tmp_path, calls, more=["--trace", "nowhere"]) == 2
    assert calls == []
    assert "no trace at nowhere" in capsys.readouterr().err
