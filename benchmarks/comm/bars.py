# SPDX-License-Identifier: Apache-2.0
"""Bars of the fused all-reduce."""

from __future__ import annotations

from statistics import geometric_mean
from typing import Any

from benchmarks.report import Bar, MissingFigureError

OURS = "ours"
PLAIN = "ours, plain launch"
VLLM = "vLLM custom all-reduce + norm"
FLASHINFER = "FlashInfer fused"
NCCL = "NCCL + our norm"
FLOOR = "our norm alone"
IMPLEMENTATIONS = (OURS, PLAIN, FLASHINFER, VLLM, NCCL, FLOOR)
SMALL_ROWS = 16
"""Decode batches in which communication is all latency."""


def comm_bars(found: dict[str, Any], *, with_times: bool) -> list[Bar]:
    """Nothing wrong, and faster than what stock runs at small batches."""
    bars = [Bar(f"{name}: wrong values", "<=", 0, lambda n=name: float(found["checks"][n])) for name in found["checks"]]
    bars.append(Bar("checks that ran", ">=", 4, lambda: float(len(found["checks"]))))
    if with_times:
        bars.append(
            Bar(f"up to {SMALL_ROWS} rows: geometric mean speed-up over stock", ">=", 1.3, lambda: _speedup(found))
        )
    return bars


def _speedup(found: dict[str, Any]) -> float:
    ratios = []
    for cell in found["times"]:
        times = cell["times_us"]
        peers = [times[name] for name in (FLASHINFER, VLLM, NCCL) if name in times]
        if cell["rows"] <= SMALL_ROWS and OURS in times and peers:
            ratios.append(min(peers) / times[OURS])
    if not ratios:
        raise MissingFigureError(found["absent"].get(OURS, "no peer ran"))
    return geometric_mean(ratios)
