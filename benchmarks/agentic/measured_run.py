# SPDX-License-Identifier: Apache-2.0
"""What `engines --out` left in a folder: its points, how fast the host was at each, and the step model that fits them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.agentic.busy import SessionsSeen
from benchmarks.agentic.engine_bars import PointFigures
from benchmarks.agentic.fit import write_step_model
from benchmarks.agentic.records import RecordError, Window, figures, goodput_at, read_records
from benchmarks.agentic.step_time import H200_DENSE_1B

SUMMARY = "engines.json"
STEP_MODEL = "step-model.json"


class _Engine(msgspec.Struct):
    num_blocks: int
    block_tokens: int


class _Summary(msgspec.Struct):
    options: dict[str, Any]
    replays: dict[str, PointFigures]
    engines: dict[str, _Engine]
    shapes: dict[str, Any] = {}
    command: str = "python -m benchmarks.agentic engines"


class MeasuredRun:
    """A folder that `engines --out` wrote. Raises RecordError for one that holds no such thing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = folder / SUMMARY
        try:
            self._summary = msgspec.convert(json.loads(path.read_text()), _Summary)
        except (OSError, ValueError, msgspec.ValidationError) as error:
            raise RecordError(f"{path}: {error}; needed: what `engines --out` wrote") from error
        self.options = self._summary.options
        self.points = {name: point for name, point in self._summary.replays.items() if "error" not in point}

    def pool(self) -> tuple[int, int]:
        """Return tokens and tokens per block of the smallest pool."""
        smallest = min(self._summary.engines.values(), key=lambda engine: engine.num_blocks)
        return smallest.num_blocks * smallest.block_tokens, smallest.block_tokens

    def figures(self, point: PointFigures, targets_tps: Iterable[float]) -> PointFigures:
        """Return a point's figures as they are counted today, from its turns, or as they were written where those are gone."""
        path = self._folder / f"{point_label(point)}.jsonl"
        if not path.exists():
            return {"goodput_at": {f"{self.options['target']:g}": point["goodput_per_gpu"]}, **point}
        recorded = read_records(path)
        window, target = Window(**recorded.run["window"]), self.options["target"]
        at_targets = goodput_at(recorded.records, window, (target, *targets_tps))
        return {**point, **figures(recorded.records, window, target), "goodput_at": at_targets}

    def write_step_model(self, target: Path, left_out: str = "") -> float | None:
        """Write a step model fitted to the steps of known shapes and to all points but one; return its mean relative error.

        None where no steps of known shapes were measured: nothing is written then.
        """
        rows, short = self._summary.shapes.get("rows"), self._summary.shapes.get("short")
        if not rows or not short:
            return None
        seen: dict[str, list[SessionsSeen]] = {}
        for name, point in self.points.items():
            if name != left_out:
                seen.setdefault(point["system"], []).append(self._seen(point))
        reference = self._summary.shapes.get("reference_ms", {})
        return write_step_model(
            H200_DENSE_1B, target, rows, self._summary.command, short, seen=seen, reference_ms=reference
        )

    def step_model(self) -> Path:
        """Return where the run's own step model lies, if it wrote one."""
        return self._folder / STEP_MODEL

    def _seen(self, point: PointFigures) -> SessionsSeen:
        recorded = read_records(self._folder / f"{(label := point_label(point))}.jsonl")
        steps = json.loads((self._folder / f"{label}.steps.json").read_bytes())
        window, budget = Window(**recorded.run["window"]), point.get("budget_tokens", 0)
        slowness = host_slowness(point, self._summary.shapes.get("reference_ms", {})) or 1.0
        return SessionsSeen(steps, recorded.records, window, budget, slowness)


def host_slowness(point: PointFigures, reference_ms: dict[str, float]) -> float | None:
    """Return how many times as long the host took around a point as where `reference_ms` comes from; None where nobody knows.

    Steps of stock say so: the host rules them, where it and the device take about as long in those of ours.
    """
    here, there = point.get("reference_ms", {}).get("stock"), reference_ms.get("stock")
    return here / there if here and there else None


def point_label(point: PointFigures) -> str:
    """Return the name of a point's files, from its figures."""
    label = f"{point['system']}{point['num_sessions']}"
    if point["system"] == "stock" and "budget_tokens" in point:
        label += f"-{point['max_num_seqs']}-{point['budget_tokens']}"
    return label + (f"-asked{point['asked_tps']:g}" if point.get("asked_tps") else "")
