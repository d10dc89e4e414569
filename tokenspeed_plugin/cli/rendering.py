# SPDX-License-Identifier: Apache-2.0
"""Prints a diagnosis for people."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tokenspeed_plugin.cli.diagnosis import Diagnosis


def render(diagnosis: Diagnosis) -> None:
    """Print `diagnosis` to standard output."""
    console = Console()
    console.print(f"[bold]tokenspeed-plugin {diagnosis.version}[/bold]")
    _render_host(console, diagnosis)
    console.print(_settings(diagnosis))
    _render_patches(console, diagnosis)
    console.print(f"Switched on: {escape(', '.join(diagnosis.switched_on)) or 'nothing'}")
    for note in diagnosis.notes:
        console.print(f"[yellow]Note:[/yellow] {escape(note)}")
    for problem in diagnosis.problems:
        console.print(f"[red]Problem:[/red] {escape(problem)}")


def _render_host(console: Console, diagnosis: Diagnosis) -> None:
    host = diagnosis.host
    verdict = f"[red]{escape(host.reason_off)}[/red]" if host.reason_off else "[green]has everything relied on[/green]"
    console.print(f"vLLM {host.version or 'not found'} (supported: {host.supported}): {verdict}")
    for name in host.missing:
        console.print(f"  missing: {escape(name)}")


def _settings(diagnosis: Diagnosis) -> Table:
    table = Table(title="Settings", title_justify="left")
    for name in ("setting", "value", "source", "allowed", "in this version"):
        table.add_column(name, overflow="fold")  # nothing is cut off on a narrow terminal
    for row in diagnosis.settings:
        table.add_row(row.key, escape(row.value), row.source, escape(row.allowed), row.available)
    return table


def _render_patches(console: Console, diagnosis: Diagnosis) -> None:
    console.print("Patched vLLM objects", style="italic")
    for row in diagnosis.patches:
        state = "[green]installed[/green]" if row.installed else "[dim]not installed[/dim]"
        console.print(f"  [bold]{row.name}[/bold] {state}  {escape(row.target)}", soft_wrap=True)
        console.print(
            f"    why: {escape(row.why)}\n    when: {escape(row.when)}\n    can go: {escape(row.goes)}",
            style="dim",
            soft_wrap=True,
        )
