# SPDX-License-Identifier: Apache-2.0
"""The step-time model starts from the file that an earlier run left; a file that is no profile ends the start and is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exact.timeline import Timeline
from exact.workload import words
from scheduler_harness import Knobs

from tokenspeed_plugin.settings import SettingsError

FIGURES = {"fixed_ms": 2.0, "row_us": 1.0, "context_us": 0.01, "prefill_us": 500.0, "pair_us": 0.0}
ROOM = Knobs(num_blocks=2000, budget_tokens=256, max_num_seqs=64, max_model_len=1000)


class Profiled(Timeline):
    """Under a rate per user, on a virtual clock: a step takes 2 ms, and 0.05 ms for every token."""

    def __init__(self, path: Path) -> None:
        settings = {"kv_eviction": "lru", "target_tps_per_user": 70.0, "step_time_profile": str(path)}
        super().__init__("tokenspeed", replace(ROOM, additional_config={"tokenspeed": settings}))
        self.now_s = 0.0
        self.scheduler = self.harness.scheduler
        self.scheduler.use_clock(lambda: self.now_s)

    def _note_plan(self, plan: Any) -> Any:
        self.now_s += (2 + 0.05 * sum(plan.num_scheduled_tokens.values())) / 1e3
        return super()._note_plan(plan)

    def serve(self, ticks: int) -> None:
        for number in range(8):
            self.submit(f"r{number}", words(number, 300), 200)
        self.ticks(ticks)


def test_a_run_leaves_what_it_learnt_and_the_next_one_starts_from_it(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    first = Profiled(path)
    first.serve(8)
    guessed = first.scheduler.pace()["relative_error"]
    first.scheduler.shutdown()
    assert not path.exists()  # so few steps say little
    first.ticks(150)
    first.scheduler.shutdown()
    assert set(json.loads(path.read_text())) == {*FIGURES, "mixed_ms", "large_mixed_ms", "large_ms"}
    assert list(tmp_path.iterdir()) == [path]
    second = Profiled(path)
    second.serve(8)
    assert second.scheduler.pace()["relative_error"] < 0.15 < 0.3 < guessed


def test_it_is_kept_once_a_minute(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    run = Profiled(path)
    run.serve(100)
    assert not path.exists()
    run.now_s += 61
    run.ticks(3)
    assert json.loads(path.read_text())["fixed_ms"] > 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "it cannot be read: Expecting value"),
        ("[1]", r"it holds \[1\]"),
        (json.dumps({**FIGURES, "row_us": -1}), "row_us is -1"),
        (json.dumps({**FIGURES, "row_us": True}), "row_us is True"),
        (json.dumps({**FIGURES, "fixed_ms": 0}), "fixed_ms is 0"),
        (json.dumps({**FIGURES, "pair_us": float("inf")}), "pair_us is inf"),
        (json.dumps({**FIGURES, "context_us": float("nan")}), "context_us is nan"),
        (json.dumps({**FIGURES, "rows": 1}), "rows is no figure"),
        (json.dumps({**FIGURES, "mixed_ms": "few"}), "mixed_ms is 'few'"),
        (json.dumps({k: v for k, v in FIGURES.items() if k != "prefill_us"}), "prefill_us is 'missing'"),
    ],
)
def test_a_file_that_is_no_profile_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(
        SettingsError, match=rf"step_time_profile: .*profile.json: {message}.*allowed: a JSON object with fixed_ms"
    ):
        Profiled(path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"there is no folder .*nowhere; allowed: a path in a folder that exists"):
        Profiled(tmp_path / "nowhere" / "profile.json")


def test_a_file_that_cannot_be_written_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    run = Profiled(folder / "profile.json")
    run.serve(100)
    folder.rmdir()
    run.scheduler.shutdown()
    run.scheduler.shutdown()
    warnings = [record.getMessage() for record in caplog.records if "cannot be written" in record.getMessage()]
    assert len(warnings) == 1
    assert "profile.json" in warnings[0]
