# SPDX-License-Identifier: Apache-2.0
"""Prints an explanation for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tokenspeed_plugin.placement.layout import text
from tokenspeed_plugin.placement.plan import Compute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenspeed_plugin.placement.explanation import CollectiveRow, Explanation, StepExplanation


def render(result: Explanation) -> None:
    """Print plan, collectives and totals of every step size."""
    console = Console(highlight=False)
    console.print(
        f"[bold]{result.graph.name}[/bold] ({result.graph.family}): {result.spec} on {result.world_size} ranks"
    )
    console.print(f"vLLM's own model for comparison: {result.baseline_configuration}")
    console.print(f"Times: {result.table.device}, {result.table.source}. {result.table.note}")
    if any(row.fused for step in result.steps for row in step.ours):
        console.print(
            "+add, +norm: done by the kernel of the all-reduce, on Hopper GPUs that reach each other's memory"
        )
    if any(row.parts > 1 for step in result.steps for row in step.ours):
        console.print("in parts: each under the linear layer's product of the next one; the times leave that out")
    for index, step in enumerate(result.steps):
        if index == 0 or step.plan.shape() != result.steps[index - 1].plan.shape():
            _print_plan(console, step)
        console.print(_collectives(f"{step.step}: ours, residual {step.residual}", step.ours))
        console.print(_collectives(f"{step.step}: vLLM", step.baseline))
    console.print(_totals(result))


def _print_plan(console: Console, step: StepExplanation) -> None:
    console.print(
        f"\n[bold]Plan from {step.step} on[/bold] (padded to a multiple of {step.plan.token_multiple} tokens)"
    )
    for section, times in step.plan.distinct():
        console.print(f"  {section.section} x {times}: stream {text(section.entry)} -> {text(section.exit)}")
        for item in section.steps:
            if isinstance(item, Compute):
                inputs = ", ".join(text(layout) for layout in item.signature.inputs)
                console.print(f"    {item.module}: {inputs} -> {text(item.signature.output)}")
            else:
                axis = step.plan.mesh.label(item.atoms)
                console.print(f"      {item.phase.value}: {item.kind.value} of {item.value} over {axis}")


def _collectives(title: str, rows: Sequence[CollectiveRow]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("section", "collective", "of", "axis"):
        table.add_column(heading)
    for heading in ("ranks", "KiB per rank (ring)", "us", "times"):
        table.add_column(heading, justify="right")
    for r in rows:
        size = f"{r.ring_bytes / 1024:,.1f}"
        table.add_row(
            r.section,
            f"{r.collective}{r.fused}" + (f" in {r.parts} parts" if r.parts > 1 else ""),
            r.what,
            r.axis,
            str(r.num_ranks),
            size,
            f"{r.time_us:,.1f}",
            str(r.times),
        )
    return table


def _totals(result: Explanation) -> Table:
    table = Table(title="One forward pass: ours / vLLM", title_justify="left")
    for heading in ("step", "residual"):
        table.add_column(heading)
    for heading in ("collectives", "MiB per rank (ring)", "us in collectives"):
        table.add_column(heading, justify="right")
    for step in result.steps:
        ours, theirs = step.totals["ours"], step.totals["vllm"]
        table.add_row(
            str(step.step),
            step.residual,
            f"{ours['collectives']:.0f} / {theirs['collectives']:.0f}",
            f"{ours['ring_bytes'] / 2**20:,.2f} / {theirs['ring_bytes'] / 2**20:,.2f}",
            f"{ours['time_us']:,.0f} / {theirs['time_us']:,.0f}",
        )
    return table
