# SPDX-License-Identifier: Apache-2.0
"""The order of the benchmark of MLA kernels in whole engines, on engines that answer by script."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import mla_engines
from benchmarks.gpu.engine_client import EngineFailedError
from benchmarks.served import run as run_module
from benchmarks.served import systems, tables, traces, turns

ANSWER = {"tokens": [5, 6], "best": [[[5, -0.1], [9, -2.0]], [[6, -0.5], [9, -1.0]]]}
GRAPH_MS = {"stock": {1: 0.6, 4: 1.0, 16: 4.0}, "ours": {1: 0.52, 4: 0.95, 16: 4.0}}


class Engine:
    """Answers commands; `broken` names one that fails."""

    def __init__(self, options: Any, broken: str = "") -> None:
        self.options, self.broken = options, broken
        self.description = {"vllm": "0.33.0"}
        self.commands: list[str] = []
        self.alike = False

    def graph_ms(self, num_sessions: int, context_tokens: int, drafts: int = 0, **_: Any) -> float:
        kind = self.options.system.partition("-")[0]
        if context_tokens > 100_000:
            return 0.7 + context_tokens * {"stock": 2.5e-6, "ours": 2.3e-6}[kind]
        saved = 0.01 * self.alike + 0.02 * self.options.system.endswith("append")
        return GRAPH_MS[kind][num_sessions] * (1 + drafts / 10) - saved

    def run(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.commands.append(command)
        if command == self.broken:
            raise EngineFailedError(f"{self.options.system}: no {command}")
        if command == "who_decodes":
            taken = {str(n): {"taken": True, "reason": "faster"} for n in arguments["counts"]}
            return {"backends": [], "page_tokens": [64], "choices": taken if self.options.system == "ours" else {}}
        if command == "returning_turn":
            is_ours = self.options.system.startswith("ours")
            return {"ttft_ms": 30.0, "forward_ms": 20.0 - 5 * is_ours, "taken": is_ours and arguments["round"] > 0}
        if command == "route_alike":
            self.alike = arguments["alike"]
            return {"routers": 7}
        if command == "graph_kernels":
            return {
                "replay_ms": 0.5,
                "kernels": [{"name": "decode_kernel", "calls": 8.0, "us": 216.0, "added_us": 200.0}],
            }
        if command == "decode_sessions":
            milliseconds = self.graph_ms(**arguments)
            return {"step_ms": milliseconds + 1, "graph_ms": milliseconds, "num_replays": 60}
        return {"answers": [ANSWER, ANSWER], "elapsed_s": 0.1}


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Engines by system, once they were built; `broken` maps a system to the command that fails on it."""
    scene: dict[str, Any] = {"engines": {}, "broken": {}}

    @contextlib.contextmanager
    def engines(entries: list[Any], *_: Any, failures: dict[str, str]) -> Iterator[dict[str, Engine]]:
        for entry in entries:
            if scene["broken"].get(entry.system) == "start":
                failures[entry.system] = "out of memory"
            else:
                scene["engines"][entry.system] = Engine(entry, scene["broken"].get(entry.system, ""))
        yield dict(scene["engines"])

    def kernel_times(context_tokens: int, counts: list[int], cache_dtype: str = "auto") -> dict[str, Any]:
        host = "flashmla" if cache_dtype == "fp8" else "flashattn3"
        times = {n: {"ours": 28.0 * n, host: 28.0 * n + 40.0 / (4 + n) + 1} for n in counts}
        return {str(n): found | {"bytes_per_s": 4.2e12} for n, found in times.items()}

    monkeypatch.setattr(run_module, "engines", engines)
    monkeypatch.setattr(run_module, "in_own_process", kernel_times)
    monkeypatch.setattr(mla_engines, "in_own_process", kernel_times)
    monkeypatch.setattr(mla_engines, "write_model", lambda model, folder: folder)
    monkeypatch.setattr(turns.time, "sleep", lambda _: None)
    return scene


def benchmark(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    target = tmp_path / "out.json"
    code = mla_engines.main(["--reps", "2", "--json", str(target), "--check", *arguments])
    return code, json.loads(target.read_text())


def missed(figures: dict[str, Any]) -> list[str]:
    return [bar["claim"] for bar in figures["bars"] if not bar["met"]]


def test_both_engines_are_measured_and_compared(stage: dict[str, Any], tmp_path: Path) -> None:
    code, figures = benchmark(tmp_path)
    assert (code, missed(figures)) == (0, [])
    decoded = ["decode_sessions"] * 9
    timed = [*decoded, "route_alike", *decoded, "route_alike"]
    expected = ["who_decodes", *timed, "tokens", "session_tokens", *["graph_kernels"] * 3]
    assert {system: engine.commands for system, engine in stage["engines"].items()} == {
        "stock": expected,
        "ours": expected,
        "stock-flashmla": ["who_decodes", "tokens", "session_tokens"],
    }
    assert figures["engines"]["ours"]["decode"]["4"]["graph_ms"] == 0.95
    assert figures["engines"]["ours"]["decode_alike"]["4"]["graph_ms"] == pytest.approx(0.94)
    assert len(figures["engines"]["ours"]["decode"]["4"]["reps"]) == 2
    assert figures["engines"]["ours"]["graphs"]["16"]["kernels"][0]["name"] == "decode_kernel"
    assert set(figures["tokens"]) == {"ours", "stock-flashmla"}


def test_the_engines_differ_in_what_is_compared_alone(stage: dict[str, Any], tmp_path: Path) -> None:
    benchmark(tmp_path, "--kernels", "mla=cuda_sm90")
    settings = {system: engine.options.llm_settings for system, engine in stage["engines"].items()}
    assert settings["ours"].pop("additional_config") == {"tokenspeed": {"kernels": "mla=cuda_sm90"}}
    assert settings["stock"].pop("additional_config") == settings["stock-flashmla"].pop("additional_config") == {}
    assert settings["stock-flashmla"].pop("attention_backend") == "FLASHMLA"
    assert settings["ours"] == settings["stock"] == settings["stock-flashmla"]
    assert len({engine.options.kv_cache_bytes for engine in stage["engines"].values()}) == 1


def test_all_engines_can_have_an_e4m3_cache(stage: dict[str, Any], tmp_path: Path) -> None:
    """Stock has FlashMLA then, so Triton is the measure of rounding, and FlashMLA alone is what ours is promised to save against."""
    code, figures = benchmark(tmp_path, "--kv-cache-dtype", "fp8")
    assert (code, missed(figures)) == (0, [])
    settings = {system: engine.options.llm_settings for system, engine in stage["engines"].items()}
    assert {found["kv_cache_dtype"] for found in settings.values()} == {"fp8"}
    assert {system: found.get("attention_backend") for system, found in settings.items()} == {
        "stock": None,
        "ours": None,
        "stock-triton": "TRITON_MLA",
    }
    assert set(figures["tokens"]) == {"ours", "stock-triton"}
    claims = [bar["claim"] for bar in figures["bars"]]
    assert "tokens: mean error of log-probabilities against stock, ours over Triton's" in claims
    plain = systems.entry("stock", mla_engines.parse_arguments([]), tmp_path, figures["layers"])
    assert {engine.options.kv_cache_bytes for engine in stage["engines"].values()} == {
        (plain.kv_cache_bytes - (1 << 28)) // 2 + (1 << 28)
    }


@pytest.mark.parametrize("command", ["start", "who_decodes", "decode_sessions"])
def test_an_engine_that_fails_leaves_its_bars_unmet(stage: dict[str, Any], tmp_path: Path, command: str) -> None:
    stage["broken"] = {"ours": command}
    code, figures = benchmark(tmp_path)
    assert code == 1
    assert "error" in figures["engines"]["ours"]
    assert any("1 session: time of the decode graph" in claim for claim in missed(figures))


def test_tokens_that_fail_leave_the_times_alone(stage: dict[str, Any], tmp_path: Path) -> None:
    stage["broken"] = {"ours": "tokens"}
    code, figures = benchmark(tmp_path, "--no-control")
    assert (code, missed(figures)) == (1, ["tokens: log-probability between stock's and ours where answers part"])


def test_drafts_have_a_pair_of_engines_each_and_their_answers_are_compared(
    stage: dict[str, Any], tmp_path: Path
) -> None:
    code, figures = benchmark(tmp_path, "--drafts", "1", "3", "--no-control")
    assert (code, missed(figures)) == (0, [])
    expected = ["who_decodes", *["decode_sessions"] * 6, "tokens"]
    for drafts in (1, 3):
        pair = [stage["engines"][f"{system}-drafts{drafts}"] for system in ("stock", "ours")]
        assert [engine.commands for engine in pair] == [expected, expected]
        stock, ours = (engine.options.llm_settings for engine in pair)
        assert stock["speculative_config"] == ours["speculative_config"]
        assert stock["speculative_config"]["num_speculative_tokens"] == drafts
        assert set(figures[f"tokens_drafts{drafts}"]) == {f"ours-drafts{drafts}", "stock"}
    assert stage["engines"]["stock"].commands.count("tokens") == 1
    assert "speculative_config" not in stage["engines"]["ours"].options.llm_settings
    assert figures["engines"]["ours-drafts3"]["decode"]["4"]["graph_ms"] == pytest.approx(0.95 * 1.3)


def test_a_context_that_grows_is_held_and_not_computed(stage: dict[str, Any], tmp_path: Path) -> None:
    code, figures = benchmark(tmp_path, "--contexts", "128K", "1M", "--no-control")
    assert (code, missed(figures)) == (0, [])
    pair = [stage["engines"][system] for system in ("stock", "ours")]
    assert set(stage["engines"]) == {"stock", "ours"}
    settings = [engine.options.llm_settings for engine in pair]
    assert settings[0]["kv_transfer_config"] == settings[1]["kv_transfer_config"]
    assert settings[0]["kv_transfer_config"]["kv_connector"] == "HeldPrefix"
    assert settings[0]["hf_overrides"]["max_position_embeddings"] >= pair[0].options.max_model_tokens > 1 << 20
    assert pair[0].options.kv_cache_bytes > (1 << 20) * 1152 * figures["layers"]
    assert set(figures["engines"]["ours"]["decode_long"]) == {str(128 << 10), str(1 << 20)}


def test_turns_that_come_back_are_timed_and_their_answers_compared(stage: dict[str, Any], tmp_path: Path) -> None:
    code, figures = benchmark(tmp_path, "--returning", "256", "1K", "--no-control")
    assert (code, missed(figures)) == (0, [])
    found = {system: figures["engines"][system]["returning_turns"] for system in ("stock", "ours")}
    assert found["ours"]["1024"]["forward_ms"] == 15.0
    assert [found[system]["256"]["taken"] for system in ("stock", "ours")] == [0, 1]
    assert stage["engines"]["ours"].commands.count("returning_turn") == 6
    assert stage["engines"]["ours"].commands.count("returning_tokens") == 1
    assert set(figures["returning_tokens"]) == {"ours"}
    settings = stage["engines"]["stock"].options.llm_settings
    assert settings["compilation_config"] == {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 256]}


def test_an_engine_more_fuses_the_append(stage: dict[str, Any], tmp_path: Path) -> None:
    code, figures = benchmark(
        tmp_path, "--append", "triton", "--no-control", "--idle-seconds", "0", "--returning", "512"
    )
    assert (code, missed(figures)) == (0, [])
    assert figures["engines"]["ours-append"]["returning_turns"]["512"]["taken"] == 1
    settings = {system: engine.options.llm_settings for system, engine in stage["engines"].items()}
    assert settings["ours-append"]["additional_config"] == {"tokenspeed": {"kernels": "append=triton"}}
    assert figures["engines"]["ours-append"]["decode"]["1"]["graph_ms"] == pytest.approx(0.5)
    assert set(figures["tokens"]) == {"ours", "ours-append"}
    benchmark(tmp_path, "--append", "triton", "--no-control", "--kernels", "mla=cuda_sm90")
    named = stage["engines"]["ours-append"].options.llm_settings["additional_config"]
    assert named == {"tokenspeed": {"kernels": "mla=cuda_sm90,append=triton"}}


def test_kernel_times_of_a_run_before_are_not_measured_again(
    stage: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = tmp_path / "known.json"
    known.write_text(json.dumps(run_module.in_own_process(65536, [1, 4, 16])))
    for module in (run_module, mla_engines):
        monkeypatch.setattr(module, "in_own_process", lambda *_: pytest.fail("measured again"))
    code, figures = benchmark(tmp_path, "--kernel-times", str(known))
    assert (code, figures["kernels_us"]) == (0, json.loads(known.read_text()))
    code, figures = benchmark(tmp_path, "--kernel-times", str(tmp_path / "none.json"))
    assert (code, "none.json" in figures["kernels_error"]) == (1, True)


@pytest.mark.parametrize("text", ["0", "x", "1.5M", "K"])
def test_a_context_that_is_no_number_of_tokens_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mla_engines.parse_arguments(["--contexts", text])
    assert "allowed: a positive number of tokens" in capsys.readouterr().err


def test_what_comes_after_the_time_is_left_out(stage: dict[str, Any], tmp_path: Path) -> None:
    code, figures = benchmark(tmp_path, "--seconds", "-1")
    assert (code, len(missed(figures))) == (1, len(figures["bars"]))
    assert "decode_sessions" not in stage["engines"]["ours"].commands


def test_reps_turn_the_order_round_and_end_with_the_time(stage: dict[str, Any]) -> None:
    order: list[tuple[str, int]] = []

    class Scripted:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, command: str, **arguments: Any) -> dict[str, float]:
            order.append((self.name, arguments["round"]))
            if self.name == "lost" and arguments["round"] == 2:
                raise EngineFailedError("gone")
            return {"step_ms": 1.0 + arguments["round"]}

    cells = [turns.Cell("1", {"num_sessions": 1, "context_tokens": 8})]
    engines: dict[str, Any] = {name: Scripted(name) for name in ("one", "lost")}
    found = turns.in_turns(engines, cells, 3, 4, idle_s=0.0, deadline=float("inf"))
    assert order == [("lost", 0), ("one", 0), ("one", 1), ("lost", 1), ("lost", 2), ("one", 2), ("one", 3)]
    assert (found["one"].by_cell["1"]["step_ms"], found["lost"].error) == (3.0, "gone")
    assert found["lost"].by_cell["1"]["step_ms"] == 2.0
    order.clear()
    turns.in_turns(engines, cells, 3, 4, idle_s=0.0, deadline=0.0)
    assert max(rep for _, rep in order) == 1


def test_a_trace_is_summed_by_kernel() -> None:
    def event(name: str, device: str, start: float, end: float) -> Any:
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, device_type=SimpleNamespace(name=device), time_range=span)

    # b starts 1 us after the first a, the second a before b has ended.
    events = [event("b", "CUDA", 14.0, 23.0), event("launch", "CPU", 0.0, 50.0)]
    events += [event("a", "CUDA", 20.0, 25.0), event("a", "CUDA", 10.0, 13.0)]
    assert traces.kernel_times(events, 2) == [
        {"name": "b", "calls": 0.5, "us": 4.5, "added_us": 5.0},
        {"name": "a", "calls": 1.0, "us": 4.0, "added_us": 2.5},
    ]
    with pytest.raises(RuntimeError, match="saw no kernel"):
        traces.kernel_times(events[1:2], 2)


def test_kernels_of_both_engines_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    flash = {"replay_ms": 1.9, "kernels": [{"name": "flash", "calls": 8.0, "us": 660.0, "added_us": 640.0}]}
    own = {"replay_ms": 1.8, "kernels": [{"name": "decode", "calls": 8.0, "us": 600.0, "added_us": 600.0}]}
    engines = {"stock": {"graphs": {"4": flash}}, "ours": {"graphs": {"4": own}}}
    tables.print_kernels({"engines": engines}, 4)
    text = capsys.readouterr().out
    assert "8 x 80.0 (82.5)" in text
    assert "8 x 75.0 (75.0)" in text
    assert "1900.0" in text
    tables.print_in_layer({"kernels_us": {"4": {"in_layer": {"ours": 81.25}}}})
    assert "81.2" in capsys.readouterr().out
    lost = {"kernels_error": "the profiler saw no kernel"}
    tables.print_kernels({"engines": {"stock": {"graphs": {"4": lost}}, "ours": {}}}, 4)
    assert "saw no kernel" in capsys.readouterr().out
