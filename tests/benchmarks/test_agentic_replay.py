# SPDX-License-Identifier: Apache-2.0
"""A replay over HTTP: closed loop, nothing lost when a server errs or stops, the server's own hit rate; and its report."""

import json

import pytest

from benchmarks.agentic.__main__ import main
from benchmarks.agentic.pictures import pareto_front
from benchmarks.agentic.records import CUT, TurnRecord, Window, figures, read_records, write_records
from benchmarks.agentic.shaping import Shape, shaped, synthetic
from tests.benchmarks.scripted_server import ScriptedServer

SMALL = ["--length", "0.05", "--output-length", "0.05", "--rate", "100", "--ramp", "0.05", "--most-turns", "3"]


def replay(server, tmp_path, *arguments):
    out = tmp_path / "turns.jsonl"
    code = main(["replay", "--base-url", server.url, "--sessions", "4", "--out", str(out), *SMALL, *arguments])
    return code, read_records(out)


def test_every_turn_is_sent_after_the_previous_answer_and_its_wait(tmp_path):
    with ScriptedServer() as server:
        code, recorded = replay(server, tmp_path, "--json", str(tmp_path / "f.json"), "--check", "--target", "5")
    assert code == 0
    trace = shaped(
        synthetic(4), Shape(num_sessions=4, length=0.05, output_length=0.05, rate=100, ramp_s=0.05, most_turns=3)
    )
    by_turn = {(record.session, record.turn): record for record in recorded.records}
    assert len(by_turn) == trace.num_turns == 12
    for session in trace.sessions:
        for number, turn in enumerate(session.turns):
            record = by_turn[session.name, number]
            assert (record.error, record.output_tokens) == ("", turn.output_tokens)
            assert record.sent_s <= record.first_s <= record.last_s
            if number:
                assert record.sent_s >= by_turn[session.name, number - 1].last_s + turn.gap_s
    sent = sorted((len(body["prompt"]), body["max_tokens"]) for body in server.requests)
    assert sent == sorted((t.prompt.num_tokens, t.output_tokens) for s in trace.sessions for t in s.turns)
    assert all(body["model"] == "scripted" and body["ignore_eos"] for body in server.requests)
    document = json.loads((tmp_path / "f.json").read_text())
    assert document["figures"]["failed"] == 0
    assert document["figures"]["hit_rate"] == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("500", "status 500: the engine is dead"),
        ("cut", "ClientPayloadError"),
        ("short", "tokens instead of"),
        ("error", "error in the stream: {'message': 'out of luck'"),
    ],
)
def test_one_answer_that_fails_is_noted_and_the_rest_goes_on(tmp_path, capsys, what, message):
    with ScriptedServer(lambda number: what if number == 5 else "ok") as server:
        code, recorded = replay(server, tmp_path, "--check", "--target", "5")
    assert code == 1  # a failed turn is a bar missed
    errors = [record.error for record in recorded.records if record.error]
    assert len(errors) == 1
    assert message in errors[0]
    assert len(recorded.records) == 12
    assert message in capsys.readouterr().err


def test_a_server_that_stops_ends_the_replay_and_what_came_is_kept(tmp_path, capsys):
    with ScriptedServer(lambda number: "ok" if number < 6 else "dead") as server:
        code, recorded = replay(server, tmp_path, "--sessions", "20")
    assert code == 3
    said = capsys.readouterr().err
    assert "20 requests failed in a row, the last with: status 500: the engine is dead" in said
    assert f"the {len(recorded.records)} turns until then are in {tmp_path / 'turns.jsonl'}" in said
    assert sum(not record.error for record in recorded.records) == 6


def test_a_server_that_is_not_there_is_named(capsys):
    assert main(["replay", "--base-url", "http://127.0.0.1:9", *SMALL]) == 3
    assert "error: http://127.0.0.1:9/v1/models: ClientConnectorError" in capsys.readouterr().err


def test_turns_under_way_at_the_end_are_cut_and_not_failed(tmp_path):
    with ScriptedServer() as server:
        code, recorded = replay(server, tmp_path, "--seconds", "0.15", "--output-length", "1.0", "--target", "5")
    assert code == 0
    assert recorded.records
    assert {record.error for record in recorded.records} == {CUT}
    assert figures(recorded.records, Window(0.0, 0.15), 5.0)["failed"] == 0


def turns(rate, num=40):
    return [
        TurnRecord("s", n, n * 0.5, n * 0.5 + 0.1, n * 0.5 + 0.1 + 50 / rate, 1000, 51, 10 * n, 0.02)
        for n in range(num)
    ]


def test_the_report_holds_pictures_and_every_system(tmp_path, capsys):
    for system, rate in (("stock", 60.0), ("ours", 90.0)):
        facts = {"system": system, "target_tps": 70.0, "num_gpus": 1, "num_sessions": 8}
        write_records(tmp_path / f"{system}.jsonl", facts, turns(rate))
    out = tmp_path / "report"
    assert main(["report", str(tmp_path / "stock.jsonl"), str(tmp_path / "ours.jsonl"), "--out", str(out)]) == 0
    for name in ("pareto.png", "hit-rate.png", "latency.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert 'src="http' not in page
    assert "<td>ours</td><td>8</td><td>40</td><td>0</td><td>90.0</td>" in page
    assert "<td>stock</td>" in page


def test_a_report_of_something_else_is_refused(tmp_path, capsys):
    (tmp_path / "x.json").write_text('{"targets": {}}')
    assert main(["report", str(tmp_path / "x.json"), "--out", str(tmp_path)]) == 2
    assert "no point in it; needed: a file that simulate or bench wrote" in capsys.readouterr().err
    (tmp_path / "x.jsonl").write_text('{"run": {"system": "a"}}\n{"kind": "turn", "session": 1}\n')
    assert main(["report", str(tmp_path / "x.jsonl"), "--out", str(tmp_path)]) == 2
    assert "x.jsonl, line 2" in capsys.readouterr().err


def test_the_front_keeps_what_nothing_beats():
    points = [(70.0, 100.0), (90.0, 80.0), (80.0, 70.0), (60.0, 90.0), (float("nan"), 500.0)]
    assert pareto_front(points) == [(70.0, 100.0), (90.0, 80.0)]
