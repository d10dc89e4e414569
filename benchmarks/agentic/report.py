# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.agentic report`: Pareto front, hit rate over time, latencies; PNG files and one HTML page."""

from __future__ import annotations

import argparse
import base64
import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.agentic.records import Recorded, RecordError, Window, figures, read_records
from benchmarks.report import console

_COLUMNS = {
    "sessions": ("num_sessions", "{:.0f}"),
    "turns": ("turns", "{:.0f}"),
    "failed": ("failed", "{:.0f}"),
    "tokens/s/user p50": ("tps_p50", "{:.1f}"),
    "p95": ("tps_p5", "{:.1f}"),
    "tokens/s/GPU": ("tokens_per_s_per_gpu", "{:,.0f}"),
    "goodput/GPU": ("goodput_per_gpu", "{:,.0f}"),
    "TTFT p95 ms": ("ttft_ms_p95", "{:,.0f}"),
    "TPOT p99 ms": ("tpot_ms_p99", "{:.1f}"),
    "hit rate": ("hit_rate", "{:.3f}"),
}


@dataclass(frozen=True)
class Point:
    """A system under a load: what the Pareto front is made of."""

    system: str
    figures: dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `report`."""
    parser.add_argument("files", type=Path, nargs="+", help=".jsonl of turns, or .json of simulate or bench")
    parser.add_argument("--out", type=Path, required=True, help="folder for report.html and the PNG files")
    parser.add_argument("--title", default="Agentic traffic")


def run(options: argparse.Namespace) -> int:
    """Write the report; return 0."""
    # Machines that only measure lack matplotlib.
    from benchmarks.agentic.pictures import draw_hit_rate, draw_latency, draw_pareto

    runs = {path.stem: read_records(path) for path in options.files if path.suffix == ".jsonl"}
    points = [point for path in options.files if path.suffix != ".jsonl" for point in _points_of(path)]
    points += [_point_of(recorded) for recorded in runs.values()]
    options.out.mkdir(parents=True, exist_ok=True)
    pictures = {"pareto.png": draw_pareto([(p.system, p.figures) for p in points])}
    if runs:
        pictures["hit-rate.png"] = draw_hit_rate(runs)
        pictures["latency.png"] = draw_latency(runs)
    for name, content in pictures.items():
        (options.out / name).write_bytes(content)
    page = options.out / "report.html"
    page.write_text(_page(options.title, points, pictures), encoding="utf-8")
    console().print(f"wrote {page}, {', '.join(pictures)}")
    return 0


def _point_of(recorded: Recorded) -> Point:
    run_facts = recorded.run
    last_s = max((record.last_s for record in recorded.records), default=0.0)
    window = Window(**run_facts["window"]) if "window" in run_facts else Window(0.0, last_s + 1e-9)
    found = figures(recorded.records, window, float(run_facts["target_tps"]), int(run_facts["num_gpus"]))
    return Point(str(run_facts["system"]), {**found, "num_sessions": run_facts.get("num_sessions", 0)})


def _points_of(path: Path) -> list[Point]:
    """Return every point of a JSON document of `simulate` or `bench`."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: {error}; needed: .jsonl of turns, or .json of simulate or bench") from error
    points = []
    for target, found in document.get("targets", {}).items():
        for entry in found["points"]:
            tuning, load = entry["point"]["tuning"], entry["point"]["num_sessions"]
            name = f"stock tokens {tuning['budget_tokens']} seqs {tuning['max_num_seqs']}"
            name = f"ours target {target}" if tuning["system"] == "ours" else name
            points.append(Point(name, {**entry["figures"], "num_sessions": load}))
    points += [Point(one["system"], one) for one in document.get("replays", {}).values() if "error" not in one]
    if not points:
        raise RecordError(f"{path}: no point in it; needed: a file that simulate or bench wrote with --json")
    return points


def _page(title: str, points: list[Point], pictures: dict[str, bytes]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("system", *_COLUMNS))
    rows = []
    for point in points:
        cells = [form.format(point.figures[key]) if key in point.figures else "-" for key, form in _COLUMNS.values()]
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in (point.system, *cells)) + "</tr>")
    images = "".join(
        f'<img alt="{html.escape(name)}" src="data:image/png;base64,{base64.b64encode(content).decode()}">'
        for name, content in pictures.items()
    )
    style = (
        "body{font:14px sans-serif;margin:2em;max-width:70em}table{border-collapse:collapse}"
        "td,th{padding:.2em .7em;border-bottom:1px solid #ccc;text-align:right}td:first-child{text-align:left}"
        "img{max-width:100%;margin:1em 0}"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{style}</style></head><body><h1>{html.escape(title)}</h1>"
        "<p>p95 of tokens/s per user: what 95% of turns reach or exceed. Goodput: output of turns at the target.</p>"
        f"{images}<table><tr>{head}</tr>{''.join(rows)}</table></body></html>\n"
    )
