# SPDX-License-Identifier: Apache-2.0
"""Commands and their options."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from tokenspeed_plugin import __version__
from tokenspeed_plugin.cli.diagnosis import Diagnosis, diagnose
from tokenspeed_plugin.cli.rendering import render
from tokenspeed_plugin.settings import allowed

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Looks after tokenspeed-plugin for vLLM.")


def _setting(key: str) -> Any:
    return typer.Option(help=f"As for vllm serve: {allowed(key)}.", metavar="VALUE", rich_help_panel="Settings to try")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def doctor(
    *,
    scheduler: Annotated[str | None, _setting("scheduler")] = None,
    kv_manager: Annotated[str | None, _setting("kv_manager")] = None,
    kv_eviction: Annotated[str | None, _setting("kv_eviction")] = None,
    kv_store: Annotated[str | None, _setting("kv_store")] = None,
    target_tps_per_user: Annotated[str | None, _setting("target_tps_per_user")] = None,
    target_overload: Annotated[str | None, _setting("target_overload")] = None,
    step_time_profile: Annotated[str | None, _setting("step_time_profile")] = None,
    placement: Annotated[str | None, _setting("placement")] = None,
    kernels: Annotated[str | None, _setting("kernels")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Check vLLM, show each setting with its source, the patches, and what is switched on.

    Give the flags of vllm serve to see what would become of them. Exit code 1: something that was asked for cannot be.
    """
    given = {
        "scheduler": scheduler,
        "kv_manager": kv_manager,
        "kv_eviction": kv_eviction,
        "kv_store": kv_store,
        "target_tps_per_user": target_tps_per_user,
        "target_overload": target_overload,
        "step_time_profile": step_time_profile,
        "placement": placement,
        "kernels": kernels,
    }
    diagnosis = diagnose({key: value for key, value in given.items() if value is not None})
    _show(diagnosis, as_json=as_json)
    raise typer.Exit(1 if diagnosis.problems else 0)


# Rooms with a command group of their own, imported only when it is called: they need torch, `doctor` must work without it.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=_PASS_ON)
def kernels(context: typer.Context) -> None:
    """List, explain, tune and time kernels (`kernels --help`)."""
    from tokenspeed_plugin.kernels.cli import app as room

    room(args=context.args, prog_name="tokenspeed-plugin kernels")


@app.command(context_settings=_PASS_ON)
def placement(context: typer.Context) -> None:
    """Explain how a model would be placed on several GPUs (`placement --help`)."""
    from tokenspeed_plugin.placement.cli import app as room

    room(args=context.args, prog_name="tokenspeed-plugin placement")


@app.command(context_settings=_PASS_ON)
def kv_map(context: typer.Context) -> None:
    """Draw the KV cache of a running server or of a recorded run (`kv-map --help`)."""
    from tokenspeed_plugin.kv_flat.cli import app as room

    room(args=context.args, prog_name="tokenspeed-plugin kv-map")


def _show(diagnosis: Diagnosis, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(diagnosis), indent=2))
    else:
        render(diagnosis)


def main() -> None:
    """Run the command line."""
    app()
