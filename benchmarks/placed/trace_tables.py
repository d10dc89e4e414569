# SPDX-License-Identifier: Apache-2.0
"""Tables of traced steps: where each system's time goes, and the kernels of vLLM's own model beside ours."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, Final

from benchmarks.report import print_table

_STOCK, _OURS = "stock", "placed"
_SHOWN_KERNELS: Final = 12
_NAME_CHARACTERS: Final = 56


def print_traces(model: str, systems: dict[str, Any]) -> None:
    """Print all that was traced of a model; nothing when nothing was."""
    traced = {system: found["traces"] for system, found in systems.items() if "traces" in found}
    for system, found in systems.items():
        if "traces_error" in found:
            print(f"{model}: {system}: no traces: {found['traces_error']}")
    if not traced:
        return
    steps = list(next(iter(traced.values())))
    rows = [(f"{step}: {system}", *_figures(found[step])) for step in steps for system, found in traced.items()]
    columns = (
        "step",
        "GPU busy ms",
        "span ms",
        "idle ms",
        "kernels",
        "copies",
        "launches",
        "in them ms",
        "first to last ms",
    )
    print_table(f"{model}: traced steps of the first rank (slowed down by the profiler)", columns, rows)
    if {_STOCK, _OURS} <= traced.keys():
        for step in steps:
            _print_kernels(f"{model}, {step}", *(traced[system][step]["kernels"] for system in (_STOCK, _OURS)))


def _figures(step: dict[str, Any]) -> tuple[str, ...]:
    copies, launches = sum(copy["calls"] for copy in step["copies"]), step["launches"]
    times = (step["busy_us"], step["span_us"], step["idle_us"])
    counts = (step["num_kernels"], copies, launches["calls"])
    host = (launches["us"], launches["span_us"])
    return (*map(_milliseconds, times), *map(str, counts), *map(_milliseconds, host))


def _print_kernels(title: str, *kernels: list[dict[str, Any]]) -> None:
    cells = [
        [(_short(k["name"]), str(round(k["calls"])), f"{k['us']:.0f}") for k in own[:_SHOWN_KERNELS]] for own in kernels
    ]
    pairs = zip_longest(*cells, fillvalue=("", "", ""))
    columns = [text for system in (_STOCK, _OURS) for text in (f"kernel of {system}", "calls", "us")]
    if any(cells):
        print_table(title, columns, [(*theirs, *ours) for theirs, ours in pairs])


def _short(name: str) -> str:
    """The front, without what all have in common; templates' arguments are long."""
    plain = name.removeprefix("void ")
    return plain if len(plain) <= _NAME_CHARACTERS else plain[: _NAME_CHARACTERS - 2] + ".."


def _milliseconds(us: float) -> str:
    return f"{us / 1e3:.2f}"
