# SPDX-License-Identifier: Apache-2.0
"""Passes of `benchmarks.mla`: their order, their limit, and what is made of their times."""

from __future__ import annotations

import math

import pytest

from benchmarks.latent.cells import LARGE, Cell
from benchmarks.latent.claims import Claims, picked_speedup, shape_of, speedup_by_other_passes
from benchmarks.latent.decode import Measured
from benchmarks.latent.passes import REPLAYS, Part, in_turn, medians, run_passes, settled_us
from benchmarks.report import MissingFigureError
from tokenspeed_plugin.kernels.autotune import TuningTable
from tokenspeed_plugin.kernels.mla.solutions import BF16
from tokenspeed_plugin.kernels.registry import Platform

CELL = Cell(128, 1, *LARGE[0])


class Clock:
    """Seconds that pass only where something is measured."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[tuple[str, object, int]] = []

    def part(self, name: str, cells: list[object], seconds: float) -> Part:
        def measure(cell: object, number: int) -> None:
            self.now += seconds
            self.log.append((name, cell, number))

        return Part(name, cells, measure)


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.latent.claims.this_platform", lambda: Platform("cuda", (9, 0), "NVIDIA H200"))

    monkeypatch.setattr("tokenspeed_plugin.kernels.nvcc.find_nvcc", lambda: "nvcc")


def test_every_pass_goes_over_all_parts() -> None:
    clock, written = Clock(), []
    parts = [clock.part("small", ["a", "b"], 1.0), clock.part("fp8", ["c"], 1.0)]
    run_passes(parts, 2, math.inf, lambda: written.append(len(clock.log)), lambda: clock.now)
    one = [("small", "a", 0), ("small", "b", 0), ("fp8", "c", 0)]
    assert clock.log == [*one, *((name, cell, 1) for name, cell, _ in one)]
    assert written == [2, 3, 5, 6]
    assert [part.seconds for part in parts] == [[2.0, 2.0], [1.0, 1.0]]


def test_a_pass_that_would_end_late_is_not_begun() -> None:
    clock = Clock()
    long, short = clock.part("long", ["a", "b"], 10.0), clock.part("short", ["c"], 1.0)
    run_passes([long, short], 3, 24.0, lambda: None, lambda: clock.now)
    assert long.report() == {"cells": 2, "passes": 1, "seconds": [20.0], "note": "1 of 3 passes within 24 s"}
    assert short.report() == {"cells": 1, "passes": 3, "seconds": [1.0, 1.0, 1.0], "note": ""}


def test_the_first_pass_ends_where_the_limit_passes() -> None:
    clock = Clock()
    long, short = clock.part("long", ["a", "b", "c"], 10.0), clock.part("short", ["d"], 1.0)
    run_passes([long, short], 3, 15.0, lambda: None, lambda: clock.now)
    assert [entry[1] for entry in clock.log] == ["a", "b"]
    assert long.report() == {"cells": 3, "passes": 0, "seconds": [], "note": "2 of 3 cells within 15 s"}
    assert short.note == "0 of 1 cells within 15 s"


def test_every_second_pass_goes_backwards() -> None:
    assert [in_turn("abc", number) for number in range(3)] == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]]


def test_what_is_timed_has_run_alone_before() -> None:
    times = iter([40.0, 45.0, 50.0, 60.0, 62.0, 61.0, 90.0, 1.0])
    assert settled_us(lambda: next(times), 100.0) == 61.5
    assert list(times) == [1.0]
    assert REPLAYS == 4
    assert settled_us(lambda: 7.0, 0.0) == 7.0


def test_times_are_medians_of_the_passes_in_which_it_ran() -> None:
    assert medians([{"ours": 3.0}, {"ours": 1.0, "peer": 5.0}, {"ours": 2.0}]) == {"ours": 2.0, "peer": 5.0}
    # The best setting is chosen by its median, not anew in each pass.
    by_setting = [
        {"peer @0": 9.0, "peer @32": 7.0},
        {"peer @0": 5.0, "peer @32": 8.0},
        {"peer @0": 8.5, "peer @32": 8.0},
    ]
    assert medians(by_setting) == {"peer": 8.0}
    measured = Measured(CELL, 1.0)
    measured.add(1, {"ours": 4.0})
    measured.add(1, {"ours, FP8": 3.0})
    measured.add(0, {"ours": 6.0})
    assert measured.passes_us == [{"ours": 6.0}, {"ours": 4.0, "ours, FP8": 3.0}]
    assert measured.times_us == {"ours": 5.0, "ours, FP8": 3.0}


def test_the_choice_of_auto_is_judged_by_times_that_it_has_not_seen() -> None:
    table = TuningTable()
    table.record("mla", "decode", BF16, shape_of(CELL), {"cuda_sm90": 1.0, "flashmla": 2.0, "flashattn3": 2.0})
    times = {"ours": 12.0, "FlashMLA": 10.0, "FlashAttention 3": 9.0}
    assert picked_speedup(CELL, times, table) == pytest.approx(9 / 12)
    passes = [
        {"ours": 9.0, "FlashMLA": 10.0, "FlashAttention 3": 20.0},
        {"ours": 11.0, "FlashMLA": 9.9, "FlashAttention 3": 20.0},
    ]
    # By the other pass FlashMLA is picked in the first one, and ours in the second.
    assert speedup_by_other_passes(Measured(CELL, 1.0, passes_us=passes)) == pytest.approx((10 / 10 + 9.9 / 11) / 2)
    with pytest.raises(MissingFigureError, match="1 pass, at least 2"):
        speedup_by_other_passes(Measured(CELL, 1.0, passes_us=passes[:1]))


def test_what_was_not_run_meets_no_bar() -> None:
    outcomes = [bar.judge() for bar in Claims([]).bars([(16, 1)])]
    assert [outcome.met for outcome in outcomes] == [False] * 9
    assert all("not checked" in outcome.note for outcome in outcomes)


@pytest.mark.parametrize(("text", "cell"), [("128x1x16x64K", CELL), ("16x2x4x100", Cell(16, 2, 4, 100))])
def test_a_cell_by_name(text: str, cell: Cell) -> None:
    assert Cell.parse(text) == cell
