# SPDX-License-Identifier: Apache-2.0
"""Tables of a run: ours beside its peers."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.control.bars import Contest
from benchmarks.control.figures import Figures
from benchmarks.report import MissingFigureError, print_table

_STATISTICS: dict[str, tuple[tuple[str, str], ...]] = {
    "decode": (("step_p50_us", "step p50, us"), ("step_p99_us", "step p99, us")),
    "decode_pressure": (
        ("step_p50_us", "step p50, us"),
        ("step_p99_us", "step p99, us"),
        ("step_max_us", "longest step, us"),
        ("preemptions", "preemptions"),
        ("control_s_per_1k_tokens", "CPU s per 1k tokens"),
    ),
    "agentic": (
        ("step_p50_us", "step p50, us"),
        ("step_p99_us", "step p99, us"),
        ("control_s_per_1k_tokens", "CPU s per 1k tokens"),
        ("hit_rate", "hit rate"),
    ),
    "admit64k": (("cold_p50_us", "cold add + plan, us"), ("warm_p50_us", "warm add + plan, us")),
}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"


def _figure(figures: Figures, system: str, cell: str, statistic: str) -> str:
    try:
        return _number(figures.value(system, cell, statistic))
    except MissingFigureError:
        return "not installed" if system in figures.missing else "-"


def _ratio(figures: Figures, cell: str, statistic: str, ours: str, peer: str) -> str:
    try:
        return f"{figures.ratio(cell, statistic, ours, peer):.3f}"
    except (MissingFigureError, ZeroDivisionError):
        return "-"


def print_cells(figures: Figures, contest: Contest, cells: Sequence[str]) -> None:
    """Print every statistic of every cell: vLLM, tokenspeed-scheduler, ours and the ratios."""
    rows = []
    for cell in cells:
        for statistic, title in _STATISTICS[cell.partition(":")[0]]:
            row = [f"{cell}: {title}"]
            row += [
                _figure(figures, system, cell, statistic) for system in (contest.vllm, contest.tokenspeed, contest.ours)
            ]
            row += [_ratio(figures, cell, statistic, contest.ours, peer) for peer in (contest.vllm, contest.tokenspeed)]
            rows.append(row)
    columns = ("cell", contest.vllm, "tokenspeed 0.1.42", contest.ours, "ours/vLLM", "ours/tokenspeed")
    print_table("Control plane, medians of the reps, thread CPU time", columns, rows)


def print_instructions(figures: Figures, base: str, changed: dict[str, str]) -> None:
    """Print the instructions per decode step of ours before and after each change."""
    if not figures.instructions:
        return
    rows = []
    for what, cell in changed.items():
        counts = [figures.instructions[base], figures.instructions[cell]]
        rows.append((what, f"{counts[0]:,.0f}", f"{counts[1]:,.0f}", f"{counts[1] / counts[0]:.4f}"))
    columns = ("change", "instructions before", "after", "ratio")
    print_table("Instructions per decode step of ours (callgrind)", columns, rows)
