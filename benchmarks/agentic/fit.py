# SPDX-License-Identifier: Apache-2.0
"""Fits a step model to measured steps: the device's part, and the CPU time of the engine's thread."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.agentic.step_time import StepShape, StepTimeModel

_LEAST_RUNNER_MS = 0.2
_NAMES = ("fixed_ms", "row_us", "context_us", "prefill_us", "pair_us")


def fit_device(rows: list[dict[str, float]], host_ms: float) -> tuple[dict[str, float], float]:
    """Return the device's coefficients, none negative, and the mean relative error over the rows that they were fitted to.

    Rows that take hardly longer than `host_ms`, the engine's own CPU time, say little about the device and are left out;
    where too few are left, all are kept: a step then takes what it took, whoever ruled it.

    Raises:
        ValueError: fewer rows than coefficients.
    """
    kept = [row for row in rows if row["ms"] > 1.15 * host_ms]
    if len(kept) < len(_NAMES):
        kept = rows
    if len(kept) < len(_NAMES):
        raise ValueError(f"{len(kept)} steps were measured; needed: {len(_NAMES)}")
    columns = [[1.0, r["decodes"] / 1e3, r["context"] / 1e3, r["prefill"] / 1e3, r["pairs"] / 1e3] for r in kept]
    measured = np.array([row["ms"] for row in kept])
    features = np.array(columns) / measured[:, None]  # relative errors count
    scale = features.max(axis=0)
    active = list(range(len(_NAMES)))
    found = np.zeros(len(_NAMES))
    while active:
        solved = np.linalg.lstsq(features[:, active] / scale[active], np.ones(len(kept)), rcond=None)[0]
        if (solved >= 0).all():
            found[active] = solved / scale[active]
            break
        del active[int(np.argmin(solved))]
    error = float(np.mean(np.abs(features @ found - 1)))
    return {name: float(value) for name, value in zip(_NAMES, found, strict=True)}, error


def host_of(base: StepTimeModel, short: dict[str, list[dict[str, float]]]) -> dict[str, list[float]]:
    """Return the table of what the runner costs, from steps with contexts so short that the device waits for the engine.

    Args:
        base: where what schedulers cost comes from.
        short: measured steps by system. What all systems have in common is the least that is left of a step without
            its scheduler's part.
    """
    rows = sorted(set.intersection(*({int(row["decodes"]) for row in steps} for steps in short.values())))
    runner = []
    for count in rows:
        left = []
        for system, steps in short.items():
            costs = replace(base, system=system).host(StepShape(count, 0, 0, 0))
            measured = min(row["ms"] for row in steps if row["decodes"] == count)
            left.append(measured - costs.schedule_ms - costs.update_ms)
        runner.append(max(_LEAST_RUNNER_MS, min(left)))
    known = base.data.host_ms
    other = np.interp(rows, known.rows, known.other).tolist()
    return {"rows": [float(count) for count in rows], "runner": runner, "other": other}


def write_step_model(
    base: Path,
    target: Path,
    rows: list[dict[str, float]],
    command: str,
    short: dict[str, list[dict[str, float]]] | None = None,
) -> float:
    """Write a step model fitted to measured steps, what schedulers cost as in `base`; return the device's mean relative error.

    Args:
        rows: steps that the device rules.
        short: by system, steps that the engine's CPU time rules; without them that time is as in `base`, too.
    """
    document: dict[str, Any] = json.loads(base.read_text())
    sources = {name: text for name, text in document["sources"].items() if not name.startswith("device")}
    model = StepTimeModel.load(base, "stock")
    if short:
        document["host_ms"] = host_of(model, short)
        sources["host_ms"] = f"runner: what is left of measured steps with short contexts: {command}"
    host_ms = float(np.interp(16, document["host_ms"]["rows"], document["host_ms"]["runner"]))
    costs = model.host(StepShape(16, 0, 0, 0))
    document["device"], error = fit_device(rows, host_ms + costs.schedule_ms + costs.update_ms)
    sources["device"] = f"fitted to {len(rows)} measured steps, mean relative error {error:.3f}: {command}"
    document["sources"] = sources
    target.write_text(json.dumps(document, indent=2) + "\n")
    StepTimeModel.load(target, "stock")
    return error
