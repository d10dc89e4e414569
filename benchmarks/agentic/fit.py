# SPDX-License-Identifier: Apache-2.0
"""Fits a step model to measured steps: the device's part, and the CPU time of the engine's thread."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.agentic.absolute_fit import absolute_fit
from benchmarks.agentic.busy import SessionsSeen, busy_cost
from benchmarks.agentic.step_time import StepShape, StepTimeModel

_LEAST_RUNNER_MS = 0.2
_HOST_RULED = 1.05  # a step that takes hardly longer than the host's part says little about the device
_DECODES, _PROMPTS = ("fixed_ms", "row_us", "context_us"), ("mixed_ms", "eager_ms", "prefill_us", "pair_us")
GRAPH_TOKENS = 512  # vLLM captures CUDA graphs for at most so many tokens
Row = dict[str, float]


def fit_device(rows: list[Row], host_ms: Callable[[Row], float]) -> tuple[dict[str, float], float]:
    """Return the device's coefficients, none negative, and the mean relative error over the rows that they were fitted to.

    First steps without prompts, then what prompts add to them: so that what is uncertain about prompts spoils no decode.
    Rows that take hardly longer than `host_ms` of them, the engine's own CPU time, say little about the device and are left out;
    where too few are left, all are kept: a step then takes what it took, whoever ruled it. So are all with prompts: those run while the
    host launches them, so that what they took is the most that they take of the device.

    Raises:
        ValueError: fewer rows than coefficients.
    """
    alone, mixed = ([row for row in rows if bool(row["prefill"]) is with_prompt] for with_prompt in (False, True))
    alone, mixed = _device_ruled(alone, host_ms), _enough(mixed)
    decodes = [[1.0, row["decodes"] / 1e3, row["context"] / 1e3] for row in (*alone, *mixed)]
    found = absolute_fit(decodes[: len(alone)], [row["ms"] for row in alone], [row["ms"] for row in alone])
    beside = np.array(decodes[len(alone) :]) @ found
    prompts = [[*_kind(row), row["prefill"] / 1e3, row["pairs"] / 1e3] for row in mixed]
    added = absolute_fit(
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
    return kept if len(kept) >= len(_DECODES) else _enough(rows)


def _enough(rows: list[Row]) -> list[Row]:
    if len(rows) < len(_DECODES):
        raise ValueError(f"{len(rows)} steps of a kind were measured; needed: {len(_DECODES)}")
    return rows


class ShortSteps:
    """Steps with contexts so short that the engine's CPU time rules them, of one system.

    Times without prompts are taken from a straight line over the number of rows, by absolute errors: one shape that was measured
    while something else ran would otherwise bend the table for all numbers near it.
    """

    def __init__(self, steps: list[Row]) -> None:
        alone = [row for row in steps if not row.get("prefill")]
        self.rows = sorted({int(row["decodes"]) for row in alone})
        times = [row["ms"] for row in alone]
        self._fixed_ms, self._row_ms = absolute_fit([[1.0, row["decodes"]] for row in alone], times, times)
        self._mixed = [row for row in steps if row.get("prefill")]

    def alone_ms(self, num_decodes: float) -> float:
        """Return the time of a step without prompts."""
        return float(self._fixed_ms + num_decodes * self._row_ms)

    def mixed_ms(self, device: dict[str, float], is_large: bool) -> tuple[float, float]:
        """Return what steps with prompts take longer, above or below the largest CUDA graph: in any case, and per row.

        What the device takes for the prompt's tokens is not the host's, as long as they fit a graph; above it the host launches every
        kernel by itself, and rules.
        """
        columns, extras = [], []
        for row in self._mixed:
            if (row["decodes"] + row["prefill"] > GRAPH_TOKENS) is is_large:
                prompt_ms = (
                    0.0
                    if is_large
                    else (row["prefill"] * device["prefill_us"] + row["pairs"] * device["pair_us"]) / 1e3
                )
                columns.append([1.0, row["decodes"]])
                extras.append(max(0.0, row["ms"] - self.alone_ms(row["decodes"]) - prompt_ms))
        if not extras:
            return 0.0, 0.0
        fixed_ms, row_ms = absolute_fit(columns, extras, [max(extras)] * len(extras)) if max(extras) > 0 else (0.0, 0.0)
        return float(fixed_ms), float(row_ms)


def host_of(base: StepTimeModel, short: dict[str, ShortSteps]) -> dict[str, list[float]]:
    """Return the table of what the runner costs.

    Args:
        base: where what schedulers cost comes from.
        short: measured steps by system. What all systems have in common is the least that is left of a step without its scheduler's part.
    """
    rows = sorted(set.intersection(*(set(steps.rows) for steps in short.values())))
    runner = []
    for count in rows:
        left = []
        for system, steps in short.items():
            costs = replace(base, system=system).host(StepShape(count, 0, 0, 0))
            left.append(steps.alone_ms(count) - costs.schedule_ms - costs.update_ms)
        runner.append(max(_LEAST_RUNNER_MS, min(left)))
    known = base.data.host_ms
    other = np.interp(rows, known.rows, known.other).tolist()
    return {"rows": [float(count) for count in rows], "runner": runner, "other": other}


def schedulers_of(
    base: StepTimeModel, host: dict[str, list[float]], short: dict[str, ShortSteps]
) -> dict[str, dict[str, Any]]:
    """Return what each system's scheduler costs: what the runner's part leaves of its measured steps, split as in `base`."""
    tables = {}
    for system, steps in short.items():
        table: dict[str, Any] = {"rows": host["rows"], "schedule": [], "update": []}
        for count, runner, other in zip(host["rows"], host["runner"], host["other"], strict=True):
            costs = replace(base, system=system).host(StepShape(count, 0, 0, 0))
            update = max(0.0, costs.update_ms - other)
            factor = max(0.0, steps.alone_ms(count) - runner - other) / (costs.schedule_ms + update)
            table["schedule"].append(costs.schedule_ms * factor)
            table["update"].append(update * factor)
        tables[system] = table
    return tables


def prompts_of(short: dict[str, ShortSteps], device: dict[str, float]) -> dict[str, dict[str, float]]:
    """Return by system the CPU time that a step takes longer because it holds a prompt (it runs without full CUDA graphs), and what
    one takes on top of that because it is too large for any.
    """
    found = {}
    for system, steps in short.items():
        (mixed_ms, mixed_row_ms), (large_ms, large_row_ms) = (steps.mixed_ms(device, large) for large in (False, True))
        found[system] = {
            "mixed": mixed_ms,
            "mixed_row_us": mixed_row_ms * 1e3,
            "eager": max(0.0, large_ms - mixed_ms),
            "eager_row_us": max(0.0, large_row_ms - mixed_row_ms) * 1e3,
        }
    return found


def write_step_model(
    base: Path,
    target: Path,
    rows: list[Row],
    command: str,
    short: dict[str, list[Row]] | None = None,
    measured_system: str = "ours",
    seen: Mapping[str, Sequence[SessionsSeen]] | None = None,
    reference_ms: Mapping[str, float] | None = None,
) -> float:
    """Write a step model fitted to measured steps; return the device's mean relative error.

    Args:
        base: a step model; what was not measured is as there.
        rows: steps of `measured_system` that the device rules.
        short: by system, steps that the engine's CPU time rules; without them that time is as in `base`, too.
        seen: by system, points at which sessions came and went.
        reference_ms: by system, what the reference's steps took beside `short`.
    """
    document: dict[str, Any] = json.loads(base.read_text())
    sources = {name: text for name, text in document["sources"].items() if not name.startswith("device")}
    document["name"] = f"fitted by: {command}"
    if short:
        model = StepTimeModel.load(base, measured_system)
        steps = {name: ShortSteps(some) for name, some in short.items()}
        document["host_ms"] = host_of(model, steps)
        document["scheduler_ms"] |= schedulers_of(model, document["host_ms"], steps)
        text = f"measured steps with short contexts: {command}"
        sources = {
            "host_ms": f"runner: what is left of {text}",
            "scheduler_ms": f"so that the parts add up to {text}",
        }
    document["device"], error = fit_device(rows, _host(document, measured_system))
    if short:
        document["host_ms"]["graph_tokens"] = GRAPH_TOKENS
        for name, extras in prompts_of(steps, document["device"]).items():
            document["scheduler_ms"][name] |= extras
        document["device"], error = fit_device(rows, _host(document, measured_system))
    for system, points in (seen or {}).items():
        cost = busy_cost(points, StepTimeModel.of(document, system))
        if cost is not None:
            table = document["scheduler_ms"][system]
            table |= {"busy_ms": cost.fixed_ms, "busy_row_us": cost.row_us}
            table |= {"mixed": cost.mixed_ms, "mixed_row_us": 0.0} if cost.mixed_ms is not None else {}
            table |= {"eager": cost.eager_ms, "eager_row_us": 0.0} if cost.eager_ms is not None else {}
    sources["device"] = f"fitted to {len(rows)} measured steps, mean relative error {error:.3f}: {command}"
    document["reference_ms"] = dict(reference_ms or {})
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
