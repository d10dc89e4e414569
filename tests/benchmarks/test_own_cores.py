# SPDX-License-Identifier: Apache-2.0
"""Cores of the engine that is measured: every thread of every process below it is there while it is measured, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.placed import own_cores
from benchmarks.placed import run as placed_run
from benchmarks.placed.own_cores import CoreShare
from benchmarks.placed.run import ModelRun
from benchmarks.placement_gpu import parse_arguments

ENGINE = """
import subprocess, sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
below = "import sys, threading; threading.Thread(target=threading.Event().wait, daemon=True).start(); print(1, flush=True); sys.stdin.read()"
child = subprocess.Popen([sys.executable, "-c", below], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(1, flush=True)
sys.stdin.read()
child.communicate()
"""
SHARE = CoreShare(frozenset({min(os.sched_getaffinity(0))}), frozenset({max(os.sched_getaffinity(0))}))


class Engine:
    """A process with another one below it, of two threads each; notes where all of them are when it measures something."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.pid, self.places = self.process.pid, set[frozenset[int]]()

    def found(self) -> list[frozenset[int]]:
        processes = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        return [frozenset(os.sched_getaffinity(t.id)) for process in processes for t in process.threads()]

    def run(self, command: str, **_: object) -> dict[str, float]:
        self.places |= set(self.found())
        return {"elapsed_s": 1.0, "step_mean_ms": 1.0}


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    found = [Engine(), Engine()]
    yield found
    for engine in found:
        engine.process.communicate()


def test_the_engine_that_is_timed_has_its_cores_to_itself(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placed_run, "_IDLE_S", 0.0)
    options = parse_arguments(["--ranks", "2", "--systems", "stock", "placed", "--batches", "1"])
    run = ModelRun(options, "dense", Path("model"), 1 << 20)
    run.take(dict(zip(("stock-dense", "placed-dense"), engines, strict=True)), {}, eager=False)  # type: ignore[arg-type]
    run.share_cores(SHARE)
    for engine in engines:
        assert engine.found() == [SHARE.rest] * 4
    run.time_steps(1)
    run.time_graphs()
    for engine in engines:
        assert engine.places == {SHARE.own}
        assert engine.found() == [SHARE.rest] * 4


def test_an_engine_that_has_ended_needs_no_cores(engines: list[Engine]) -> None:
    engines[0].process.communicate()
    SHARE.confine(engines[0].pid)
    with SHARE.given_to(engines[0].pid):
        assert engines[1].found() != [SHARE.own] * 4 or SHARE.own == SHARE.rest


def test_threads_of_one_physical_core_are_given_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_cores, "_SIBLINGS", str(tmp_path / "{}"))
    monkeypatch.setattr(own_cores.os, "sched_getaffinity", lambda _: set(range(1, 8)))
    for core in range(4):
        for thread in (core, core + 4):
            (tmp_path / str(thread)).write_text(f"{core},{core + 4}\n")
    assert CoreShare.of(4, 1) == CoreShare(frozenset({1, 5, 2, 6}), frozenset({3, 4, 7}))
    assert CoreShare.of(5, 1).own == {1, 5, 2, 6, 3}
    for core in range(8):
        (tmp_path / str(core)).unlink()
    assert CoreShare.of(4, 1).own == {1, 2, 3, 4}


@pytest.mark.parametrize(("ranks", "least"), [(1, 4), (2, 8), (4, 12)])
def test_cores_that_leave_nothing_or_are_too_few_for_an_engine_are_refused(
    ranks: int, least: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own_cores.os, "sched_getaffinity", lambda _: set(range(64)))
    for num_cores in (-1, least - 1, 64):
        with pytest.raises(SystemExit):
            parse_arguments(["--ranks", str(ranks), "--own-cores", str(num_cores)])
        assert f"--own-cores: {num_cores} own cores, allowed: from {least}, 2 for each" in capsys.readouterr().err
    for num_cores in (least, 63):
        found = parse_arguments(["--ranks", str(ranks), "--own-cores", str(num_cores)]).cores
        assert (len(found.own), len(found.rest)) == (num_cores, 64 - num_cores)
    assert parse_arguments([]).cores is None
