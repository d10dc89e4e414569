# SPDX-License-Identifier: Apache-2.0
"""Tables of replays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.report import print_table

_ROWS = {
    "turns": ("turns", "{:,.0f}"),
    "turns that failed": ("failed", "{:,.0f}"),
    "TTFT p50, ms": ("ttft_ms_p50", "{:,.1f}"),
    "TTFT p95, ms": ("ttft_ms_p95", "{:,.1f}"),
    "TTFT p99, ms": ("ttft_ms_p99", "{:,.1f}"),
    "TPOT p50, ms": ("tpot_ms_p50", "{:,.2f}"),
    "TPOT p95, ms": ("tpot_ms_p95", "{:,.2f}"),
    "TPOT p99, ms": ("tpot_ms_p99", "{:,.2f}"),
    "longest gap between tokens p99, ms": ("longest_gap_ms_p99", "{:,.1f}"),
    "tokens/s per user p50": ("tps_p50", "{:,.1f}"),
    "tokens/s per user p95": ("tps_p5", "{:,.1f}"),
    "tokens/s per user p99": ("tps_p1", "{:,.1f}"),
    "share of turns at the target": ("met_share", "{:.3f}"),
    "tokens/s per GPU": ("tokens_per_s_per_gpu", "{:,.0f}"),
    "goodput, tokens/s per GPU": ("goodput_per_gpu", "{:,.0f}"),
    "hit rate": ("hit_rate", "{:.3f}"),
    "preemptions": ("preemptions", "{:,.0f}"),
    "cores used by this client": ("client_cpu_share", "{:.2f}"),
}


def print_replays(
    by_name: Mapping[str, Mapping[str, Any]], target_tps: float, also_targets_tps: Iterable[float] = ()
) -> None:
    """Print one column per replay; p95 and p99 of tokens/s are what 95% and 99% of turns reach or exceed."""
    rows = [
        (label, *(form.format(figures[key]) if key in figures else "-" for figures in by_name.values()))
        for label, (key, form) in _ROWS.items()
    ]
    rows += [
        (f"goodput at {target:g}", *(f"{figures['goodput_at'][f'{target:g}']:,.0f}" for figures in by_name.values()))
        for target in also_targets_tps
    ]
    print_table(f"Replay, target {target_tps:g} tokens/s per user", ("", *by_name), rows)
