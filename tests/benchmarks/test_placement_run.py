# SPDX-License-Identifier: Apache-2.0
"""The placement benchmark's run: whose engines are whose, what a failure costs, and when reps end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import placement_gpu
from benchmarks.gpu.engine_client import EngineFailedError
from benchmarks.placed import run as placed_run
from benchmarks.placed.run import ModelRun
from benchmarks.placed.traces import step_figures
from benchmarks.placement_gpu import parse_arguments

ANSWER = {"tokens": [1, 2, 3], "best": [[[1, -0.5]], [[2, -0.5]], [[3, -0.5]]]}


class ScriptedEngine:
    """Answers as an engine process does; `broken_from` is the call from which on it fails."""

    def __init__(self, step_ms: float, broken_from: float = float("inf")) -> None:
        self.description = {"vllm": "scripted"}
        self.calls: list[str] = []
        self._step_ms, self._broken_from = step_ms, broken_from

    def run(self, command: str, timeout_s: float | None = None, **arguments: Any) -> Any:
        self.calls.append(command)
        if len(self.calls) > self._broken_from:
            raise EngineFailedError("scripted: broken")
        if command == "throughput":
            # The first round is for warming up, and slow.
            factor = 100.0 if arguments["round"] in (0, placed_run._PREFILL_ROUND) else 1.0
            return {"elapsed_s": factor * self._step_ms, "step_mean_ms": factor * self._step_ms}
        return {
            "tokens": {"answers": [ANSWER]},
            "collectives": {"prefill": [], "decode": []},
            "links": {
                "links": {"all-reduce": [(float(size), 5.0 + size / 1e5) for size in (1e4, 4e4, 16e4)]},
                "link_changes": {"all-reduce": [2e4]},
            },
            "graph_times": {"1": self._step_ms},
            "traces": {step: step_figures([]) for step in ("prefill", "1")},
        }[command]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placed_run, "_IDLE_S", 0.0)


def model_run(*arguments: str, name: str = "dense") -> ModelRun:
    options = parse_arguments(["--ranks", "2", "--systems", "stock", "placed", "--batches", "1", *arguments])
    return ModelRun(options, name, Path("model"), 1 << 20)


def test_engines_of_all_models_have_names_of_their_own_and_begin_with_their_system() -> None:
    names = [
        entry.system
        for name in ("dense", "mla")
        for eager in (True, False)
        for entry in model_run(name=name).entries(eager=eager)
    ]
    assert len(set(names)) == len(names) == 8
    assert [entry.is_stock for entry in model_run().entries(eager=True)] == [True, False]
    assert [entry.system for entry in model_run().entries(eager=False)] == ["stock-dense", "placed-dense"]


def test_figures_are_those_of_the_models_own_engines() -> None:
    engines = {
        f"{system}{kind}-{model}": ScriptedEngine(step_ms)
        for model, step_ms in (("dense", 1.0), ("mla", 7.0))
        for system in ("stock", "placed")
        for kind in ("-eager", "")
    }
    run = model_run()
    run.take(engines, {}, eager=True)  # type: ignore[arg-type]
    run.check_tokens()
    run.take(engines, {}, eager=False)  # type: ignore[arg-type]
    run.check_tokens_as_run()
    run.time_links()
    run.time_graphs()
    for rep in range(2):
        run.time_steps(rep)
    assert not any(engine.calls for name, engine in engines.items() if name.endswith("mla"))
    placed = run.figures["placed"]
    assert placed["decode_ms"] == {"1": 1.0}
    assert placed["prefill_ms"] == 1000.0
    assert placed["decode_gpu_ms"] == {"1": 1.0}
    assert placed["tokens"]["mismatches"] == placed["tokens_as_run"]["mismatches"] == []
    assert len(run.figures["stock"]["links"]["all-reduce"]) == 3
    assert run.figures["stock"]["link_changes"] == {"all-reduce": [2e4]}
    assert "links" not in placed


def test_an_engine_that_fails_is_named_and_the_others_go_on() -> None:
    engines = {"stock-dense": ScriptedEngine(2.0), "placed-dense": ScriptedEngine(1.0, broken_from=2)}
    run = model_run("--no-eager")
    run.take(engines, {}, eager=False)  # type: ignore[arg-type]
    run.check_tokens_as_run()
    for rep in range(2):
        run.time_steps(rep)
    assert run.figures["placed"]["error"] == "scripted: broken"
    assert run.figures["stock"]["decode_ms"] == {"1": 2.0}
    run = model_run("--no-eager")
    run.take({"stock-dense": ScriptedEngine(2.0)}, {"placed-dense": "no memory"}, eager=False)  # type: ignore[dict-item]
    assert run.figures["placed"]["error"] == "no memory"


def test_a_trace_that_fails_takes_no_other_figure_away() -> None:
    engines = {"stock-dense": ScriptedEngine(2.0), "placed-dense": ScriptedEngine(1.0, broken_from=2)}
    run = model_run("--no-eager", "--traces")
    run.take(engines, {}, eager=False)  # type: ignore[arg-type]
    run.time_steps(1)
    run.trace_steps()
    assert run.figures["placed"]["decode_ms"] == {"1": 1.0}
    assert run.figures["placed"]["traces_error"] == "scripted: broken"
    assert "error" not in run.figures["placed"]
    assert list(run.figures["stock"]["traces"]) == ["prefill", "1"]


@pytest.mark.parametrize(
    ("seconds", "more", "reps"), [(1000.0, (), 3), (0.0, (), 0), (25.0, (), 1), (43.0, (), 3), (43.0, ("--traces",), 2)]
)
def test_no_rep_begins_that_would_end_too_late(
    seconds: float, more: tuple[str, ...], reps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 0.0

    class Reps:
        done, num_timed = 0, 1

        def time_graphs(self) -> None:
            pass

        def time_steps(self, rep: int) -> None:
            nonlocal clock
            clock += 10.0
            self.done = rep

    monkeypatch.setattr(placement_gpu.time, "monotonic", lambda: clock)
    options = parse_arguments(["--reps", "3", "--total-seconds", str(seconds), *more])
    timed, written = Reps(), list[str]()
    placement_gpu._time(options, [timed], 0.0, written.append)  # type: ignore[list-item]
    assert timed.done == reps
    assert ("no time for more" in written[-1]) == (reps < 3)


def test_engines_for_tokens_are_gone_before_those_that_are_timed_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing: list[list[str]] = []

    @contextmanager
    def scripted(entries: list[Any], *rest: Any, **options: Any) -> Iterator[dict[str, ScriptedEngine]]:
        standing.append([entry.system for entry in entries])
        yield {entry.system: ScriptedEngine(1.0) for entry in entries}

    monkeypatch.setattr(placement_gpu, "engines", scripted)
    options = parse_arguments(
        ["--models", "dense", "--systems", "stock", "placed", "--batches", "1", "--reps", "1", "--traces"]
    )
    figures = placement_gpu._measure(options, tmp_path)
    assert standing == [["stock-eager-dense", "placed-eager-dense"], ["stock-dense", "placed-dense"]]
    placed = figures["models"]["dense"]["placed"]
    assert placed["collectives"] == {"prefill": [], "decode": []}
    assert placed["decode_ms"] == {"1": 1.0}
    assert placed["tokens"]["error"]["mean"] == placed["tokens_as_run"]["error"]["mean"] == 0.0
    assert list(figures["links"]) == ["all-reduce"]
    assert placed["traces"]["prefill"]["busy_us"] == 0.0
