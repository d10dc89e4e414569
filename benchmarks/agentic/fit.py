# SPDX-License-Identifier: Apache-2.0
"""Fits a step model to measured steps: the device's part, and the CPU time of the engine's thread."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.agentic.step_time import StepShape, StepTimeModel

_LEAST_RUNNER_MS = 0.2
_HOST_RULED = 1.15  # a step that takes hardly longer than the host's part says little about the device
_ROUNDS, _CLOSE = 40, 1e-3  # of reweighting; relative errors below are all alike
_DECODES, _PROMPTS = ("fixed_ms", "row_us", "context_us"), ("mixed_ms", "eager_ms", "prefill_us", "pair_us")
GRAPH_TOKENS = 512  # vLLM captures CUDA graphs for at most so many tokens
Row = dict[str, float]


def fit_device(rows: list[Row], host_ms: Callable[[Row], float]) -> tuple[dict[str, float], float]:
    """Return the device's coefficients, none negative, and the mean relative error over the rows that they were fitted to.

    First steps without prompts, then what prompts add to them: so that what is uncertain about prompts spoils no decode.
    Rows that take hardly longer than `host_ms` of them, the engine's own CPU time, say little about the device and are left out;
    where too few are left, all are kept: a step then takes what it took, whoever ruled it.

    Raises:
        ValueError: fewer rows than coefficients.
    """
    alone, mixed = ([row for row in rows if bool(row["prefill"]) is with_prompt] for with_prompt in (False, True))
    alone, mixed = (_device_ruled(some, host_ms) for some in (alone, mixed))
    decodes = [[1.0, row["decodes"] / 1e3, row["context"] / 1e3] for row in (*alone, *mixed)]
    found = _fitted(decodes[: len(alone)], [row["ms"] for row in alone], [row["ms"] for row in alone])
    beside = np.array(decodes[len(alone) :]) @ found
    prompts = [[*_kind(row), row["prefill"] / 1e3, row["pairs"] / 1e3] for row in mixed]
    added = _fitted(
        prompts, [row["ms"] - ms for row, ms in zip(mixed, beside, strict=True)], [row["ms"] for row in mixed]
    )
    errors = [*(np.array(decodes[: len(alone)]) @ found), *(beside + np.array(prompts) @ added)]
    measured = np.array([row["ms"] for row in (*alone, *mixed)])
    names = dict(zip((*_DECODES, *_PROMPTS), (*found, *added), strict=True))
    return {name: float(value) for name, value in names.items()}, float(
        np.mean(np.abs(np.array(errors) / measured - 1))
    )


def _kind(row: Row) -> tuple[float, float]:
    """Whether a step with prompts was captured, and whether it was too large for that."""
    is_eager = row["decodes"] + row["prefill"] > GRAPH_TOKENS
    return float(not is_eager), float(is_eager)


def _device_ruled(rows: list[Row], host_ms: Callable[[Row], float]) -> list[Row]:
    kept = [row for row in rows if row["ms"] > _HOST_RULED * host_ms(row)]
    if len(kept) < len(_DECODES):
        kept = rows
    if len(kept) < len(_DECODES):
        raise ValueError(f"{len(kept)} steps of a kind were measured; needed: {len(_DECODES)}")
    return kept


def _fitted(columns: list[list[float]], measured: list[float], weights: list[float]) -> NDArray[np.float64]:
    """Return coefficients of which none is negative, by absolute errors relative to `weights`: a few odd steps do little."""
    features = np.array(columns) / np.array(weights)[:, None]
    wanted = np.array(measured) / np.array(weights)
    trust = np.ones(len(wanted))
    for _ in range(_ROUNDS):
        found = _least_squares(features * trust[:, None], wanted * trust)
        trust = 1 / np.sqrt(np.maximum(np.abs(features @ found - wanted), _CLOSE))
    return found


def _least_squares(features: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    scale = np.maximum(features.max(axis=0), 1e-12)
    active = list(range(features.shape[1]))
    found = np.zeros(features.shape[1])
    while active:
        solved = np.linalg.lstsq(features[:, active] / scale[active], wanted, rcond=None)[0]
        if (solved >= 0).all():
            found[active] = solved / scale[active]
            break
        del active[int(np.argmin(solved))]
    return found


def host_of(base: StepTimeModel, short: dict[str, list[Row]]) -> dict[str, list[float]]:
    """Return the table of what the runner costs, from steps with contexts so short that the device waits for the engine.

    Args:
        base: where what schedulers cost comes from.
        short: measured steps without prompts by system. What all systems have in common is the least that is left of a step without
            its scheduler's part.
    """
    rows = sorted(set.intersection(*({int(row["decodes"]) for row in steps} for steps in short.values())))
    runner = []
    for count in rows:
        left = []
        for system, steps in short.items():
            costs = replace(base, system=system).host(StepShape(count, 0, 0, 0))
            left.append(_measured(steps, count) - costs.schedule_ms - costs.update_ms)
        runner.append(max(_LEAST_RUNNER_MS, min(left)))
    known = base.data.host_ms
    other = np.interp(rows, known.rows, known.other).tolist()
    return {"rows": [float(count) for count in rows], "runner": runner, "other": other}


def schedulers_of(
    base: StepTimeModel, host: dict[str, list[float]], short: dict[str, list[Row]]
) -> dict[str, dict[str, list[float]]]:
    """Return what each system's scheduler costs: what the runner's part leaves of its measured steps, split as in `base`."""
    tables = {}
    for system, steps in short.items():
        table: dict[str, list[float]] = {"rows": host["rows"], "schedule": [], "update": []}
        for count, runner, other in zip(host["rows"], host["runner"], host["other"], strict=True):
            costs = replace(base, system=system).host(StepShape(count, 0, 0, 0))
            update = max(0.0, costs.update_ms - other)
            factor = max(0.0, _measured(steps, int(count)) - runner - other) / (costs.schedule_ms + update)
            table["schedule"].append(costs.schedule_ms * factor)
            table["update"].append(update * factor)
        tables[system] = table
    return tables


def mixed_of(short: dict[str, list[Row]], device: dict[str, float]) -> float:
    """Return the CPU time that a captured step takes longer because it holds a prompt: it runs without full CUDA graphs.

    The median over numbers of rows and systems; what the device takes for the prompt's tokens is not the host's.
    """
    extras = []
    for steps in short.values():
        for row in steps:
            if row.get("prefill") and row["decodes"] + row["prefill"] <= GRAPH_TOKENS:
                prompt_ms = (row["prefill"] * device["prefill_us"] + row["pairs"] * device["pair_us"]) / 1e3
                alone_ms = _measured([one for one in steps if not one.get("prefill")], int(row["decodes"]))
                extras.append(row["ms"] - alone_ms - prompt_ms)
    return max(0.0, median(extras)) if extras else 0.0


def eager_of(rows: list[Row], host_ms: Callable[[Row], float]) -> float:
    """Return the CPU time that a step of more tokens than were captured takes longer: the least that `host_ms` leaves of one."""
    left = [row["ms"] - host_ms(row) for row in rows if row["decodes"] + row["prefill"] > GRAPH_TOKENS]
    return max(0.0, min(left)) if left else 0.0


def _measured(steps: list[Row], count: int) -> float:
    return min(row["ms"] for row in steps if row["decodes"] == count)


def write_step_model(
    base: Path,
    target: Path,
    rows: list[Row],
    command: str,
    short: dict[str, list[Row]] | None = None,
    measured_system: str = "ours",
) -> float:
    """Write a step model fitted to measured steps; return the device's mean relative error.

    Args:
        base: a step model; what was not measured is as there.
        rows: steps of `measured_system` that the device rules.
        short: by system, steps that the engine's CPU time rules; without them that time is as in `base`, too.
    """
    document: dict[str, Any] = json.loads(base.read_text())
    sources = {name: text for name, text in document["sources"].items() if not name.startswith("device")}
    document["name"] = f"fitted by: {command}"
    if short:
        alone = {system: [row for row in steps if not row.get("prefill")] for system, steps in short.items()}
        model = StepTimeModel.load(base, measured_system)
        document["host_ms"] = host_of(model, alone)
        document["scheduler_ms"] |= schedulers_of(model, document["host_ms"], alone)
        text = f"measured steps with short contexts: {command}"
        sources = {
            "host_ms": f"runner, mixed, eager: what is left of {text}",
            "scheduler_ms": f"so that the parts add up to {text}",
        }
    document["device"], error = fit_device(rows, _host(document, measured_system))
    if short:
        document["host_ms"] |= {"mixed": mixed_of(short, document["device"]), "graph_tokens": GRAPH_TOKENS}
        document["host_ms"]["eager"] = eager_of(
            [*rows, *(row for row in short.get(measured_system, []) if row.get("prefill"))],
            _host(document, measured_system),
        )
        document["device"], error = fit_device(rows, _host(document, measured_system))
    sources["device"] = f"fitted to {len(rows)} measured steps, mean relative error {error:.3f}: {command}"
    document["sources"] = sources
    target.write_text(json.dumps(document, indent=2) + "\n")
    StepTimeModel.load(target, measured_system)
    return error


def _host(document: dict[str, Any], system: str) -> Callable[[Row], float]:
    model = StepTimeModel.of(document, system)

    def host_ms(row: Row) -> float:
        costs = model.host(StepShape(row["decodes"], row["context"], row["prefill"], row["pairs"]))
        return costs.schedule_ms + costs.runner_ms + costs.update_ms

    return host_ms
