# SPDX-License-Identifier: Apache-2.0
"""Fits the device's part of a step model to measured steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.agentic.step_time import StepShape, StepTimeModel

_NAMES = ("fixed_ms", "row_us", "context_us", "prefill_us", "pair_us")


def fit_device(rows: list[dict[str, float]], host_ms: float) -> tuple[dict[str, float], float]:
    """Return the device's coefficients, none negative, and the mean relative error over the rows that they were fitted to.

    Rows that take hardly longer than `host_ms`, the engine's own CPU time, say nothing about the device and are left out.

    Raises:
        ValueError: fewer rows are left than there are coefficients.
    """
    kept = [row for row in rows if row["ms"] > 1.15 * host_ms]
    if len(kept) < len(_NAMES):
        raise ValueError(
            f"{len(kept)} of {len(rows)} steps take longer than the host's {host_ms:.2f} ms; needed: {len(_NAMES)}"
        )
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


def write_step_model(base: Path, target: Path, rows: list[dict[str, float]], command: str) -> float:
    """Write a step model with the device fitted to `rows`, everything else as in `base`; return the mean relative error."""
    document: dict[str, Any] = json.loads(base.read_text())
    host = StepTimeModel.load(base, "stock").host(StepShape(16, 0, 0, 0))
    document["device"], error = fit_device(rows, host.schedule_ms + host.runner_ms + host.update_ms)
    sources = {name: text for name, text in document["sources"].items() if not name.startswith("device")}
    sources["device"] = f"fitted to {len(rows)} measured steps, mean relative error {error:.3f}: {command}"
    document["sources"] = sources
    target.write_text(json.dumps(document, indent=2) + "\n")
    StepTimeModel.load(target, "stock")
    return error
