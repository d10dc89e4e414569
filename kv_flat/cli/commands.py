# SPDX-License-Identifier: Apache-2.0
"""``kv-map``: a picture of the block pool, from a running server or a recorded run."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenspeed_plugin.kv_flat.kv_map import KvMapError, Snapshot, record, snapshots_from

ROUTE = "/tokenspeed/kv_map"
_FORMS = (".svg", ".png")

app = typer.Typer(
    add_completion=False, help="Draw the KV cache: which session, prefix and state each block belongs to."
)


@app.command()
def kv_map(
    *,
    url: Annotated[
        str | None, typer.Option(help="A running server, such as http://localhost:8000, with VLLM_SERVER_DEV_MODE=1.")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="A recorded run, in place of a server.")] = None,
    out: Annotated[list[Path] | None, typer.Option(help="Draw to this file, .svg or .png; may be repeated.")] = None,
    save: Annotated[Path | None, typer.Option(help="Record what the server says in this file.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Snapshots to take of a server.")] = 1,
    every_s: Annotated[float, typer.Option("--every", min=0.0, help="Seconds between them.")] = 1.0,
    engine: Annotated[int, typer.Option(min=0, help="Rank of the engine to draw.")] = 0,
    api_key: Annotated[str | None, typer.Option(envvar="VLLM_API_KEY", help="As the server wants it.")] = None,
) -> None:
    """Take snapshots of a server or read a recorded run, and draw the last one; several also show states over time."""
    if (url is None) == (run is None):
        raise typer.BadParameter("give one of --url and --run")
    for path in out or ():
        if path.suffix not in _FORMS:
            raise typer.BadParameter(f"--out {path} ends in {path.suffix!r}; allowed: {', '.join(_FORMS)}")
    text = run.read_text() if run is not None else _recorded(str(url), count, every_s, api_key)
    if save is not None:
        save.write_text(text)
    try:
        snapshots = [shot for shot in snapshots_from(text) if shot.engine == engine]
    except KvMapError as error:
        raise typer.BadParameter(f"{run or url}: {error}") from error
    if not snapshots:
        raise typer.BadParameter(f"{run or url}: no snapshot of engine {engine}")
    _summarize(snapshots[-1])
    for path in out or ():
        _draw(snapshots, path)


def _recorded(url: str, count: int, every_s: float, api_key: str | None) -> str:
    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"--url {url} is no address of a server; allowed: http://... and https://...")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    taken: list[Any] = []
    for number in range(count):
        if number:
            time.sleep(every_s)
        try:
            request = urllib.request.Request(url.rstrip("/") + ROUTE, headers=headers)  # noqa: S310 - checked above
            with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
                taken += json.load(answer)["snapshots"]
        except urllib.error.HTTPError as error:
            hint = (
                "; the server must run --scheduler tokenspeed with VLLM_SERVER_DEV_MODE=1 and tokenspeed in VLLM_PLUGINS"
                if error.code == 404
                else ""
            )
            raise typer.BadParameter(f"{url}{ROUTE} answers {error.code}{hint}") from error
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"{url}{ROUTE}: {error}") from error
    return json.dumps(record(taken))


def _summarize(snapshot: Snapshot) -> None:
    states = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in snapshot.num_by_state().items())
    typer.echo(f"{snapshot.num_blocks} blocks: {states}; {len(snapshot.requests)} requests hold blocks")


def _draw(snapshots: list[Snapshot], path: Path) -> None:
    try:
        from tokenspeed_plugin.kv_flat.cli.drawing import draw
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise typer.BadParameter("drawing needs matplotlib: pip install 'tokenspeed-plugin[pictures]'") from error
    draw(snapshots, path)
    typer.echo(f"wrote {path}")
