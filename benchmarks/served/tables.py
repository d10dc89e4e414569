# SPDX-License-Identifier: Apache-2.0
"""What a run of `benchmarks.mla_engines` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.report import MissingFigureError, print_table
from benchmarks.served.bars import predicted_ms
from benchmarks.served.systems import APPEND, OURS, SYSTEMS, drafting

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
    if figures["append"]:
        title = "Decode with the append fused (the second of each two columns), and without"
        print_decode(figures, title, (OURS, APPEND), figures["sessions"])
    if figures["contexts"]:
        title = "Decode of one session by tokens of its context"
        print_decode(figures, title, SYSTEMS, figures["contexts"], "decode_long")
    print_returning(figures)
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
        promise = _predicted(figures, cell) if pair == SYSTEMS and part != "decode_long" else "-"
        rows.append((str(cell), *numbers, promise, who.get("reason", "-")))
    columns = ("", "graph ms, stock", "ours", "step ms, stock", "ours", "promised saving, ms", "choice")
    print_table(title, columns, rows)


def print_returning(figures: dict[str, Any]) -> None:
    """Turns that come back, by their new tokens."""
    rows, systems = [], (*SYSTEMS, *([APPEND] if figures["append"] else []))
    for new_tokens in figures["returning"]:
        engines = [figures["engines"][system] for system in systems]
        turns = [engine.get("returning_turns", {}).get(str(new_tokens), {}) for engine in engines]
        numbers = [_number(found, key) for key in ("forward_ms", "ttft_ms") for found in turns]
        rows.append((str(new_tokens), *numbers, f"{turns[1].get('taken', 0):g} of {turns[1].get('forwards', 0):g}"))
    if rows:
        numbers_of = (f"{what} ms, {system}" for what in ("forward", "first token") for system in systems)
        columns = ("new tokens", *numbers_of, "forward passes with our prefill")
        print_table(f"Turns that come back to {figures['context_tokens']} tokens", columns, rows)


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
    """The kernels of one replay of the decode graph, side by side.

    Of kernels that overlap the one that ends last gets the time; how long each runs tells whether it became slower.
    """
    systems = [system for system in (*SYSTEMS, APPEND) if "graphs" in figures["engines"].get(system, {})]
    graphs = [figures["engines"][system]["graphs"].get(str(count), {}) for system in systems]
    times = [{kernel["name"]: kernel for kernel in graph.get("kernels", ())} for graph in graphs]
    if not any(times):
        reasons = [reason for graph in graphs if (reason := graph.get("kernels_error"))]
        if reasons:
            print(f"kernels of {count} sessions: {'; '.join(reasons)}")
        return
    names = sorted({name for found in times for name in found}, key=lambda name: -max(_us(t, name) for t in times))
    rows = [(name[:_NAME_CHARACTERS], *(_launches(found, name) for found in times)) for name in names[:_NUM_KERNELS]]
    rest = [sum(_us(found, name) for name in names[_NUM_KERNELS:]) for found in times]
    total = [sum(_us(found, name) for name in found) for found in times]
    alone = [f"{1e3 * graph.get('replay_ms', 0.0):.1f}" for graph in graphs]
    rows += [("others", *(f"{us:.1f}" for us in rest)), ("all kernels", *(f"{us:.1f}" for us in total))]
    rows.append(("a replay by itself", *alone))
    title = f"Kernels of the decode graph of {count} sessions: launches x microseconds that each adds (runs)"
    print_table(title, ("kernel", *systems), rows)


def _us(found: dict[str, Any], name: str) -> float:
    return float(found[name]["added_us"]) if name in found else 0.0


def _launches(found: dict[str, Any], name: str) -> str:
    if name not in found:
        return "-"
    calls, us = found[name]["calls"], _us(found, name)
    return f"{calls:g} x {us / calls:.1f} ({found[name]['us'] / calls:.1f})"


def _number(found: dict[str, Any], key: str) -> str:
    return f"{found[key]:.3f}" if key in found else "-"


def _predicted(figures: dict[str, Any], count: int) -> str:
    try:
        return f"{predicted_ms(figures, count):.3f}"
    except (MissingFigureError, KeyError):
        return "-"
