# SPDX-License-Identifier: Apache-2.0
"""``placement explain``: a plan and its price for any number of GPUs, on a machine that has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from tokenspeed_plugin.kernels.comm.limits import OVERLAP_HIDDEN
from tokenspeed_plugin.placement.algebra import PlacementError
from tokenspeed_plugin.placement.choice import choose
from tokenspeed_plugin.placement.cli.rendering import render
from tokenspeed_plugin.placement.cost import CostTable
from tokenspeed_plugin.placement.drawing import draw
from tokenspeed_plugin.placement.explanation import Explanation, Step, explain
from tokenspeed_plugin.placement.model_source import read_config
from tokenspeed_plugin.placement.models import declare
from tokenspeed_plugin.placement.models.decoder import with_pipeline
from tokenspeed_plugin.placement.residual import Residual
from tokenspeed_plugin.placement.spec import FORM, Overlapping, PlacementSpec, split_options

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Compiled parallelism: plans without a GPU.")


@app.callback()
def _group() -> None:
    """Keep ``explain`` a sub-command."""


@app.command("explain")
def explain_command(
    model: Annotated[str, typer.Argument(help="config.json, a folder with one, or a model of the Hugging Face cache.")],
    *,
    world: Annotated[int, typer.Option(min=1, help="Ranks of one pipeline stage.")] = 8,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    placement: Annotated[str, typer.Option(help=f"auto, or {FORM}.")] = "auto",
    residual: Annotated[Residual, typer.Option(help="Let the cost model choose, or force one.")] = Residual.AUTO,
    overlap: Annotated[Overlapping, typer.Option(help="Linear layers over their reductions.")] = Overlapping.AUTO,
    decode: Annotated[list[int] | None, typer.Option(min=1, help="Decode batch size; may be repeated.")] = None,
    prefill: Annotated[list[int] | None, typer.Option(min=1, help="Prefill tokens; may be repeated.")] = None,
    cost_table: Annotated[Path | None, typer.Option(help="Another machine's numbers, as JSON.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a drawing of the most frequent layer to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Print the plan, every collective with bytes and estimated time, and vLLM's hand-written model beside it."""
    steps = [Step(n, n) for n in decode or (1, 16, 128)] + [Step(n, 1) for n in prefill or (8192,)]
    try:
        table = CostTable.load(cost_table)
        graph = with_pipeline(declare(model, read_config(model)), pp)
        options = split_options(f"{placement},residual={residual.value},overlap={overlap.value}")
        spec = choose(graph, world, table) if options.spec == "auto" else PlacementSpec.parse(options.spec)
        overlaps = _overlaps(overlap, graph.sizes["hidden"])
        result = explain(graph, spec, world, steps, table=table, residual=options.residual, overlaps=overlaps)
    except (PlacementError, ValidationError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if svg is not None:
        svg.write_text(_drawing(result))
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
    else:
        render(result)


def _overlaps(overlap: Overlapping, hidden: int) -> bool:
    """Whether linear layers overlap on the GPUs that the cost table is of."""
    return hidden >= OVERLAP_HIDDEN if overlap is Overlapping.AUTO else overlap is not Overlapping.OFF


def _drawing(result: Explanation) -> str:
    """The section that runs most often, for the largest step."""
    plan = max(result.steps, key=lambda s: s.step.num_tokens).plan
    section, _ = max(plan.distinct(), key=lambda item: item[1])
    return draw(plan, section)
