# SPDX-License-Identifier: Apache-2.0
"""Snapshots of the pool say what the pool holds; the command draws them and names what is wrong with its input."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import httpx
import numpy as np
import pytest
from exact.timeline import Timeline
from exact.workload import words
from fastapi import FastAPI
from scheduler_knobs import Group, Knobs
from typer.testing import CliRunner
from vllm.v1.engine.core import EngineCore

from tokenspeed_plugin.entry_points.endpoint import ROUTE, KvMapEndpoint
from tokenspeed_plugin.host import patches
from tokenspeed_plugin.kv_flat import kv_map
from tokenspeed_plugin.kv_flat.cli import app, commands
from tokenspeed_plugin.kv_flat.cli.drawing import colour_of, holdings_of

STATE = {name: number for number, name in enumerate(kv_map.STATES)}


@pytest.fixture
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Timeline:
    """A pool of 30 blocks: a session that is over, a pinned one, two running requests that share a prefix, and free blocks."""
    scheduler = getattr(request, "param", "tokenspeed")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setattr(EngineCore, patches.KV_MAP_METHOD, None, raising=False)  # taken away again behind the test
    run = Timeline(scheduler, Knobs(groups=(Group(4),), num_blocks=30, max_num_seqs=4))
    run.submit("over", words(1, 17), 1, extra={"session_id": "past"})
    run.finish()
    run.submit("kept", words(2, 9), 1, extra={"session_id": "kept", "extra_args": {"kv_pin_s": 600}})
    run.finish()
    run.submit("first", words(3, 12) + words(4, 4), 20, extra={"session_id": "live"})
    run.ticks(2)
    run.submit("second", words(3, 12) + words(5, 2), 20)
    run.ticks(2)
    return run


@pytest.fixture
def snapshot(run: Timeline) -> kv_map.Snapshot:
    (snapshot,) = kv_map.snapshots_from(json.dumps(kv_map.record([kv_map.encoded(run.scheduler.kv_map(), 5.0, 0)])))
    return snapshot


either_scheduler = pytest.mark.parametrize("run", ["tokenspeed", "flat"], indirect=True)


@either_scheduler
def test_states_are_those_of_the_pool(run: Timeline, snapshot: kv_map.Snapshot) -> None:
    scheduler = run.scheduler
    gauges = (scheduler._core if hasattr(scheduler, "_core") else scheduler.kv_cache_manager._kv).kv_gauges()
    assert snapshot.num_by_state() == {state: gauges[state] for state in kv_map.STATES}
    assert min(snapshot.num_by_state().values()) > 0
    assert snapshot.num_blocks == 30
    assert (snapshot.block_tokens, snapshot.key_tokens) == ((4,), 4)


@either_scheduler
def test_blocks_in_use_name_their_request_and_place(run: Timeline, snapshot: kv_map.Snapshot) -> None:
    tables = {row.req_id: row.block_ids[0] for plan in run.plans for row in plan.scheduled_new_reqs}
    requests = {label: (number, session, tokens) for label, number, session, tokens in snapshot.requests}
    assert set(requests) == {"first", "second"}
    for depth, block in enumerate(tables["second"]):
        assert snapshot.columns["depth"][block - 1] == depth
        assert snapshot.columns["state"][block - 1] == STATE["in_use"]
        assert snapshot.columns["owners"][block - 1] == (2 if depth < 3 else 1)
    assert snapshot.columns["run"][tables["second"][3] - 1] == requests["second"][0]
    assert snapshot.session_names[requests["first"][1]] == "live"
    assert requests["second"][1] == 0


@either_scheduler
def test_blocks_belong_to_sessions_and_prefixes(run: Timeline, snapshot: kv_map.Snapshot) -> None:
    by_name = {snapshot.session_names.get(h.session, ""): h for h in holdings_of(snapshot)}
    assert by_name["past"].num_by_state[STATE["cached"]] == 4
    assert by_name["kept"].num_by_state[STATE["pinned"]] == 2
    assert sum(sum(h.num_by_state) for h in holdings_of(snapshot)) == 30 - snapshot.num_by_state()["free"]
    live = [h for h in holdings_of(snapshot) if h.num_shared]
    assert sum(h.num_shared for h in live) == 3
    assert len({h.prefix for h in by_name.values()}) == len(by_name)


def test_a_session_keeps_its_colour() -> None:
    assert colour_of(17) == colour_of(17) != colour_of(18)
    assert len(set(colour_of(0))) == 1, "nobody's blocks are grey"


@pytest.fixture
def recorded(run: Timeline, tmp_path: Path) -> Path:
    """A run of three snapshots."""
    shots = []
    for second in range(3):
        shots.append(kv_map.encoded(run.scheduler.kv_map(), float(second), 0))
        run.ticks(2)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(kv_map.record(shots)))
    return path


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_recorded_run_is_drawn_as_svg_and_png(recorded: Path, tmp_path: Path) -> None:
    svg, png = tmp_path / "pool.svg", tmp_path / "pool.png"
    result = invoke("--run", recorded, "--out", svg, "--out", png)
    assert result.exit_code == 0, result.output
    assert "30 blocks: " in result.output
    texts = ElementTree.parse(svg).getroot()
    assert texts.tag == "{http://www.w3.org/2000/svg}svg"
    drawn = svg.read_text()
    # matplotlib writes each text as a comment beside its outlines.
    assert all(
        f"<!-- {text}" in drawn for text in ("30 blocks by number", "by session and prefix", "seconds", "live / ")
    )
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ('{"format": "other"}', "format is 'other'; allowed: 'tokenspeed-kv-map/1'"),
        ('{"format": "tokenspeed-kv-map/1", "snapshots": [{}]}', "broken snapshot: KeyError"),
        ('{"format": "tokenspeed-kv-map/1", "snapshots": []}', "no snapshot of engine 0"),
    ],
)
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    result = invoke("--run", path)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_bad_options_are_named(recorded: Path) -> None:
    assert "--url and --run" in invoke().output
    assert "allowed: .svg, .png" in " ".join(
        invoke("--run", recorded, "--out", "x.pdf").output.replace("│", "").split()
    )
    assert invoke("--url", "file:///x").exit_code == 2


class FakeEngine:
    """What a client of two engine cores answers."""

    def __init__(self, run: Timeline) -> None:
        self.run = run
        self.engine_core = self

    async def call_utility_all_async(self, method: str) -> list[dict[str, Any]]:
        assert method == patches.KV_MAP_METHOD
        return [self.run.scheduler.kv_map(), self.run.scheduler.kv_map()]


def ask(app_: FastAPI) -> httpx.Response:
    async def get() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app_), base_url="http://server") as client:
            return await client.get(ROUTE)

    return asyncio.run(get())


def app_with(engine: Any) -> FastAPI:
    plugin, app_ = KvMapEndpoint(), FastAPI()
    plugin.attach_router(app_)
    asyncio.run(plugin.init_state(engine, None, None))
    return app_


def test_the_route_answers_with_a_record_of_every_engine(run: Timeline) -> None:
    assert ROUTE == commands.ROUTE
    answer = ask(app_with(FakeEngine(run)))
    assert answer.status_code == 200
    assert [shot.engine for shot in kv_map.snapshots_from(answer.text)] == [0, 1]


def test_without_development_mode_there_is_no_route(run: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "0")
    assert ask(app_with(FakeEngine(run))).status_code == 404


def test_a_server_without_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    answer = ask(app_with(None))
    assert (answer.status_code, answer.json()["detail"]) == (404, "this server has no engine")


def test_the_engine_core_passes_the_question_on(run: Timeline) -> None:
    assert patches.KV_MAP.is_installed
    core = SimpleNamespace(scheduler=run.scheduler)
    raw = getattr(EngineCore, patches.KV_MAP_METHOD)(core)
    assert np.frombuffer(raw["state"], dtype="u1").size == 31
