# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the KV manager's costs judges by its bars, and its systems do what is timed."""

from __future__ import annotations

import pytest

from benchmarks import kv_manager
from benchmarks.kvmanager import costs


def met(factor: float) -> list[bool]:
    figures = {
        size: {"match_us": 60 * factor, "cycle_us": 100 * factor, "bytes_per_block": 128 * factor}
        for size in kv_manager.BLOCK_TOKENS
    }
    return [bar.judge().met for bar in kv_manager.all_bars(figures)]


def test_bars_are_missed_by_figures_that_miss_them() -> None:
    assert met(1.0) == [True] * 6
    assert met(1.01) == [False] * 6
    assert not any(bar.judge().met for bar in kv_manager.all_bars({}))


def test_both_systems_find_the_prompt_and_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "MATCH_TOKENS", 2_000)
    monkeypatch.setattr(costs, "CYCLE_BLOCKS", 50)
    figures = costs.costs(16, reps=3)
    assert all(value > 0 for value in figures.values())
    assert {name.removeprefix("stock_") for name in figures} == {"match_us", "cycle_us", "bytes_per_block"}
