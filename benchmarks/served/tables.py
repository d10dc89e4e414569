# SPDX-License-Identifier: Apache-2.0
"""What a run of `benchmarks.mla_engines` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.report import MissingFigureError, print_table
from benchmarks.served.bars import predicted_ms
from benchmarks.served.systems import LONG, SYSTEMS, drafting

_NUM_KERNELS = 12
_NAME_CHARACTERS = 70


def print_figures(figures: dict[str, Any]) -> None:
    """Every part that ran."""
    print_decode(figures, f"Decode of sessions of {figures['context_tokens']} tokens", SYSTEMS, figures["sessions"])
    print_decode(
        figures, "The same, with the same experts for every token", SYSTEMS, figures["sessions"], "decode_alike"
    )
    for drafts in figures["drafts"]:
        title = f"Decode with {drafts} drafts, all taken; times of a step"
        print_decode(figures, title, drafting(drafts), figures["draft_sessions"])
    if figures["contexts"]:
        print_decode(figures, "Decode of one session by tokens of its context", LONG, figures["contexts"])
    print_in_layer(figures)
    for count in figures["sessions"]:
        print_kernels(figures, count)
    for kind in [kind for kind in figures if "tokens" in kind and isinstance(figures[kind], dict)]:
        for system, found in figures[kind].items():
            parted = [f"{m.get('margin', float('nan')):.3f}" for m in found["mismatches"]]
            print(f"{kind}, {system}: {len(parted)} of {found['requests']} answers part, margins {parted}")
            print(f"  error of log-probabilities before that: {found['error']}")


def print_decode(
    figures: dict[str, Any], title: str, pair: tuple[str, str], cells: Sequence[int], part: str = "decode"
) -> None:
    """Graph and step of two engines by cell, and what the kernels alone promise where it is known."""
    rows = []
    for cell in cells:
        decode = [figures["engines"][system].get(part, {}).get(str(cell), {}) for system in pair]
        who = figures["engines"][pair[1]].get("who", {}).get("choices", {}).get(str(cell)) or {}
        numbers = [_number(found, key) for key in ("graph_ms", "step_ms") for found in decode]
        promise = _predicted(figures, cell) if pair == SYSTEMS else "-"
        rows.append((str(cell), *numbers, promise, who.get("reason", "-")))
    columns = ("", "graph ms, stock", "ours", "step ms, stock", "ours", "promised saving, ms", "choice")
    print_table(title, columns, rows)


def print_in_layer(figures: dict[str, Any]) -> None:
    """What MLA decode adds to a layer, by sessions."""
    columns = {
        count: found["in_layer"] for count, found in figures.get("kernels_us", {}).items() if "in_layer" in found
    }
    if columns:
        names = next(iter(columns.values()))
        rows = [(name, *(f"{added[name]:.1f}" for added in columns.values())) for name in names]
        print_table("Microseconds that MLA decode adds to a layer, by sessions", ("kernel", *columns), rows)


def print_kernels(figures: dict[str, Any], count: int) -> None:
    """The kernels of one replay of the decode graph, side by side."""
    graphs = [figures["engines"][system].get("graphs", {}).get(str(count), {}) for system in SYSTEMS]
    times = [{kernel["name"]: kernel for kernel in graph.get("kernels", ())} for graph in graphs]
    if not any(times):
        reasons = [reason for graph in graphs if (reason := graph.get("kernels_error"))]
        if reasons:
            print(f"kernels of {count} sessions: {'; '.join(reasons)}")
        return
    names = sorted(times[0] | times[1], key=lambda name: -max(_us(found, name) for found in times))
    rows = [(name[:_NAME_CHARACTERS], *(_launches(found, name) for found in times)) for name in names[:_NUM_KERNELS]]
    rest = [sum(_us(found, name) for name in names[_NUM_KERNELS:]) for found in times]
    total = [sum(kernel["us"] for kernel in found.values()) for found in times]
    alone = [f"{1e3 * graph.get('replay_ms', 0.0):.1f}" for graph in graphs]
    rows += [("others", *(f"{us:.1f}" for us in rest)), ("all kernels", *(f"{us:.1f}" for us in total))]
    rows.append(("a replay by itself", *alone))
    title = f"Kernels of the decode graph of {count} sessions: launches x microseconds"
    print_table(title, ("kernel", *SYSTEMS), rows)


def _us(found: dict[str, Any], name: str) -> float:
    return float(found[name]["us"]) if name in found else 0.0


def _launches(found: dict[str, Any], name: str) -> str:
    if name not in found:
        return "-"
    calls, us = found[name]["calls"], found[name]["us"]
    return f"{calls:g} x {us / calls:.1f}"


def _number(found: dict[str, Any], key: str) -> str:
    return f"{found[key]:.3f}" if key in found else "-"


def _predicted(figures: dict[str, Any], count: int) -> str:
    try:
        return f"{predicted_ms(figures, count):.3f}"
    except (MissingFigureError, KeyError):
        return "-"
