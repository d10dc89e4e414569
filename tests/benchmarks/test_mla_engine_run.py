# SPDX-License-Identifier: Apache-2.0
"""The order of the benchmark of MLA kernels in whole engines, on engines that answer by script."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import mla_engines
from benchmarks.gpu.engine_client import EngineFailedError
from benchmarks.served import run as run_module

ANSWER = {"tokens": [5, 6], "best": [[[5, -0.1], [9, -2.0]], [[6, -0.5], [9, -1.0]]]}
GRAPH_MS = {"stock": {1: 0.6, 4: 1.0, 16: 4.0}, "ours": {1: 0.52, 4: 0.95, 16: 4.0}}


class Engine:
    """Answers commands; `broken` names one that fails."""

    def __init__(self, options: Any, broken: str = "") -> None:
        self.options, self.broken = options, broken
        self.description = {"vllm": "0.33.0"}
        self.commands: list[str] = []

    def run(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.commands.append(command)
        if command == self.broken:
            raise EngineFailedError(f"{self.options.system}: no {command}")
        if command == "who_decodes":
            taken = {str(n): {"taken": True, "reason": "faster"} for n in arguments["counts"]}
            return {"backends": [], "page_tokens": [64], "choices": taken if self.options.system == "ours" else {}}
        if command == "fill_sessions":
            return {"elapsed_s": 1.0}
        if command == "decode_sessions":
            milliseconds = GRAPH_MS[self.options.system][arguments["num_sessions"]]
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

    def kernel_times(context_tokens: int, counts: list[int]) -> dict[str, Any]:
        return {str(n): {"ours": 28.0 * n, "flashattn3": 28.0 * n + 40.0 / (4 + n) + 1} for n in counts}

    monkeypatch.setattr(run_module, "engines", engines)
    monkeypatch.setattr(run_module, "in_own_process", kernel_times)
    monkeypatch.setattr(mla_engines, "in_own_process", kernel_times)
    monkeypatch.setattr(mla_engines, "write_model", lambda model, folder: folder)
    monkeypatch.setattr(run_module.time, "sleep", lambda _: None)
    return scene


def benchmark(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    target = tmp_path / "out.json"
    code = mla_engines.main(["--reps", "2", "--json", str(target), "--check", *arguments])
    return code, json.loads(target.read_text())


def missed(figures: dict[str, Any]) -> list[str]:
    return [bar["claim"] for bar in figures["bars"] if not bar["met"]]


def test_both_engines_are_filled_measured_and_compared(stage: dict[str, Any], tmp_path: Path) -> None:
    code, figures = benchmark(tmp_path)
    assert (code, missed(figures)) == (0, [])
    expected = ["who_decodes", "fill_sessions", *["decode_sessions"] * 9, "tokens", "session_tokens"]
    assert {system: engine.commands for system, engine in stage["engines"].items()} == {
        "stock": expected,
        "ours": expected,
        "stock-flashmla": ["who_decodes", "tokens", "session_tokens"],
    }
    assert figures["engines"]["ours"]["decode"]["4"]["graph_ms"] == 0.95
    assert len(figures["engines"]["ours"]["decode"]["4"]["reps"]) == 2
    assert set(figures["tokens"]) == {"ours", "stock-flashmla"}


def test_the_engines_differ_in_what_is_compared_alone(stage: dict[str, Any], tmp_path: Path) -> None:
    benchmark(tmp_path, "--kernels", "mla=cuda_sm90")
    settings = {system: engine.options.llm_settings for system, engine in stage["engines"].items()}
    assert settings["ours"].pop("additional_config") == {"tokenspeed": {"kernels": "mla=cuda_sm90"}}
    assert settings["stock"].pop("additional_config") == settings["stock-flashmla"].pop("additional_config") == {}
    assert settings["stock-flashmla"].pop("attention_backend") == "FLASHMLA"
    assert settings["ours"] == settings["stock"] == settings["stock-flashmla"]
    assert len({engine.options.kv_cache_bytes for engine in stage["engines"].values()}) == 1


@pytest.mark.parametrize("command", ["start", "fill_sessions", "decode_sessions"])
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
