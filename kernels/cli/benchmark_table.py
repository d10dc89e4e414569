# SPDX-License-Identifier: Apache-2.0
"""The tuning table of what `benchmarks.mla --json` wrote, in one run or several: medians over every pass of every run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenspeed_plugin.kernels.autotune import TuningTable, median_table
from tokenspeed_plugin.kernels.mla.cached_prefill.solutions import MODE as CACHED_PREFILL
from tokenspeed_plugin.kernels.mla.cached_prefill.solutions import TUNED
from tokenspeed_plugin.kernels.mla.share import PAGE_TOKENS
from tokenspeed_plugin.kernels.mla.solutions import (
    BENCHMARK_NAMES,
    BF16,
    FP8,
    FP8_BENCHMARK_NAMES,
    SETTING,
    decode_shape,
)


class NoBenchmarkError(ValueError):
    """A file is no output of `benchmarks.mla`, or its GPU or kernels are not those of the others; the message names it."""


def gpu_and_table(paths: Sequence[Path]) -> tuple[str, TuningTable]:
    """The GPU that all files are of, and the medians of their times by shape bucket and solution.

    Raises:
        NoBenchmarkError: see there.
    """
    tables: list[TuningTable] = []
    origins: list[tuple[str, Any]] = []
    for path in paths:
        try:
            document = json.loads(path.read_text())
            origins.append((str(document["gpu"]), document.get("kernel_sources")))
            tables.extend(_tables(document))
        except (KeyError, TypeError, ValueError) as error:
            raise NoBenchmarkError(f"{path} is no output of benchmarks.mla --json: {error!r}") from error
        if origins[-1] != origins[0]:
            raise NoBenchmarkError(f"{path} is of another GPU or of other kernels than {paths[0]}")
    return origins[0][0], _best_settings(median_table(tables))


def _tables(document: dict[str, Any]) -> Iterator[TuningTable]:
    """One table for each time that a cell was timed."""
    for measured in document["cells"]:
        for times_us in _passes(measured):
            table = TuningTable()
            for signature, names in ((BF16, BENCHMARK_NAMES), (FP8, FP8_BENCHMARK_NAMES)):
                named = {}
                for name, us in times_us.items():
                    implementation, at, setting = name.partition(SETTING)
                    if implementation in names:
                        named[f"{names[implementation]}{at}{setting}"] = float(us)
                if named:
                    table.record("mla", "decode", signature, _shape(measured["cell"]), named)
            yield table
    for measured in document.get("prefills", []):
        for times_us in _passes(measured):
            table = TuningTable()
            weighed = {name: times_us[name] for name in TUNED if name in times_us}
            table.record("mla", CACHED_PREFILL, BF16, _shape(measured["cell"]), weighed)
            yield table


def _best_settings(table: TuningTable) -> TuningTable:
    best = TuningTable()
    for bucket, times_us in table.buckets.items():
        found = best.buckets.setdefault(bucket, {})
        for name, us in times_us.items():
            solution = name.partition(SETTING)[0]
            found[solution] = min(us, found.get(solution, us))
    return best


def _passes(measured: dict[str, Any]) -> list[dict[str, float]]:
    """Times by implementation of each pass; older files have one figure only."""
    passes: list[dict[str, float]] = measured.get("passes_us") or [measured["times_us"]]
    return passes


def _shape(cell: dict[str, int]) -> dict[str, int]:
    return decode_shape(
        cell["heads"], cell["query_tokens"], PAGE_TOKENS, cell.get("requests", 1), cell["context_tokens"]
    )
