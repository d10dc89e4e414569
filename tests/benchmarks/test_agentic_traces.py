# SPDX-License-Identifier: Apache-2.0
"""Trace files in, sessions out; a file that cannot be read says where and why."""

import gzip
import json

import numpy as np
import pytest

from benchmarks.agentic.__main__ import main
from benchmarks.agentic.loaders import TraceError, load
from benchmarks.agentic.shaping import Shape, open_trace, shaped, synthetic
from benchmarks.agentic.trace import Prompt, shared_tokens


def coding_session(*requests):
    return json.dumps({"block_size": 64, "requests": list(requests)})


FIRST = {"t": 3.0, "in": 130, "out": 5, "hash_ids": [1, 2], "api_time": 4.0}
SECOND = {"t": 10.0, "in": 200, "out": 7, "hash_ids": [1, 2, 3], "model": "any"}


def test_coding_sessions_wait_from_answer_to_request(tmp_path):
    with gzip.open(tmp_path / "a.json.gz", "wt") as file:
        file.write(coding_session(FIRST, SECOND))
    (tmp_path / "b.json").write_text(coding_session(SECOND))
    trace = load(str(tmp_path))
    assert [session.name for session in trace.sessions] == ["a", "b"]
    first, second = trace.sessions[0].turns
    assert (first.gap_s, second.gap_s) == (0.0, 3.0)  # sent at 10, the answer to 3 came at 7
    assert shared_tokens(first.prompt, second.prompt) == 128
    assert shared_tokens(first.prompt, trace.sessions[1].turns[0].prompt) == 0  # ids of another file


def test_a_request_without_an_answer_is_no_turn(tmp_path):
    (tmp_path / "a.json").write_text(coding_session(FIRST, SECOND | {"out": 0}))
    assert load(str(tmp_path / "a.json")).num_turns == 1


def test_mooncake_requests_share_ids_in_the_whole_file(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [7, 8, 9]},
        {"timestamp": 1500, "input_length": 1030, "output_length": 4, "hash_ids": [7, 8, 10]},
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    one, two = load(str(tmp_path / "m.jsonl")).sessions
    assert two.start_s == 1.5
    assert shared_tokens(one.turns[0].prompt, two.turns[0].prompt) == 1024


def test_azure_times_count_from_the_first_row(tmp_path):
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n2023-11-16 18:17:05.0000000,31,8\n"
    )
    (tmp_path / "z.csv").write_text(text)
    one, two = load(str(tmp_path / "z.csv")).sessions
    assert two.start_s == pytest.approx(1.02004)
    assert (one.turns[0].prompt.num_tokens, one.turns[0].output_tokens) == (48, 10)


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.json", "{nonsense", ["a.json, line 1", "'{nonsense'", "block_size, requests"]),
        ("a.json", coding_session(FIRST | {"in": -3}), ["$.requests[0].in", ">= 1", "-3"]),
        ("a.json", coding_session(FIRST | {"hash_ids": [1, "x"]}), ["$.requests[0].hash_ids[1]", "'x'"]),
        ("a.json", coding_session(FIRST | {"hash_ids": [1] * 9}), ["requests[0]", "9 hash_ids", "130 tokens"]),
        ("m.jsonl", '{"timestamp": 1, "input_length": 5}', ["m.jsonl, line 1", "output_length"]),
        (
            "m.jsonl",
            '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": []}\n{"timestamp": -1}',
            ["m.jsonl, line 2", "-1"],
        ),
        ("m.jsonl", "", ["m.jsonl", "no request"]),
        ("z.csv", "a,b\n", ["z.csv, line 1", "['a', 'b']", "TIMESTAMP"]),
        ("z.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", ["z.csv, line 2", "noon,1,2", "18:17:03"]),
        ("z.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,0,2\n", ["line 2", "at least 1"]),
        ("x.parquet", "", ["x.parquet", "unknown format '.parquet'", ".jsonl (Mooncake)"]),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, parts):
    (tmp_path / name).write_text(content)
    with pytest.raises(TraceError) as caught:
        load(str(tmp_path / name))
    for part in [str(tmp_path), *parts]:
        assert part in str(caught.value)


def test_a_cut_gzip_file_is_named(tmp_path):
    (tmp_path / "m.jsonl.gz").write_bytes(gzip.compress(b"a" * 100)[:20])
    with pytest.raises(TraceError, match=r"m\.jsonl\.gz: cannot be read"):
        load(str(tmp_path / "m.jsonl.gz"))


def test_the_command_ends_with_the_message(capsys):
    assert main(["simulate", "--trace", "/nowhere/at-all"]) == 2
    assert "error: no trace at /nowhere/at-all" in capsys.readouterr().err


def test_a_name_is_looked_for_in_the_traces_folder(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text(coding_session(FIRST))
    monkeypatch.setenv("TOKENSPEED_TRACES", str(tmp_path))
    assert load("a.json").num_turns == 1


def prompt(ids, num_tokens, space=0, block_tokens=16):
    return Prompt(space, np.array(ids, dtype=np.uint32), block_tokens, num_tokens, tail=0)


def test_tokens_are_a_function_of_space_and_block():
    one, two = prompt([3, 4], 40).token_ids(), prompt([3, 5], 40).token_ids()
    assert len(one) == 40
    assert one[:16] == two[:16]
    assert one[16:32] != two[16:32]
    assert prompt([3, 4], 40, space=1).token_ids()[:16] != one[:16]
    assert set(prompt([3, 4], 40).token_ids(first_token=10, num_kinds=5)) <= set(range(10, 15))


def test_length_scales_block_by_block_and_keeps_what_is_shared():
    trace = synthetic(2, seed=1)
    half = shaped(trace, Shape(length=0.5))
    for session, scaled in zip(trace.sessions, half.sessions, strict=True):
        pairs = zip(session.turns, session.turns[1:], scaled.turns, scaled.turns[1:], strict=False)
        for turn, following, small, small_following in pairs:
            assert small.prompt.num_tokens * 2 == turn.prompt.num_tokens
            shared = shared_tokens(turn.prompt, following.prompt)
            assert shared_tokens(small.prompt, small_following.prompt) * 2 == shared


def test_rate_divides_waits_and_long_ones_are_cut():
    trace = synthetic(3, seed=2)
    fast = shaped(trace, Shape(rate=4.0, most_gap_s=2.0))
    gaps = [turn.gap_s for session in trace.sessions for turn in session.turns]
    assert [t.gap_s for s in fast.sessions for t in s.turns] == [min(gap / 4, 2.0) for gap in gaps]
    assert max(gaps) > 8


def test_more_sessions_than_there_are_have_content_of_their_own(tmp_path):
    (tmp_path / "a.json").write_text(coding_session(FIRST, SECOND))
    trace = open_trace(str(tmp_path), Shape(num_sessions=3, ramp_s=5.0, seed=3))
    assert len(trace.sessions) == 3
    contents = {tuple(session.turns[0].prompt.token_ids()[:64]) for session in trace.sessions}
    assert len(contents) == 3
    assert all(0 <= session.start_s <= 5 for session in trace.sessions)
    again = open_trace(str(tmp_path), Shape(num_sessions=3, ramp_s=5.0, seed=3))
    assert [session.start_s for session in again.sessions] == [session.start_s for session in trace.sessions]


def test_synthetic_sessions_share_a_prefix():
    one, two = synthetic(2).sessions
    assert shared_tokens(one.turns[0].prompt, two.turns[0].prompt) == 1536
    assert shared_tokens(one.turns[0].prompt, one.turns[1].prompt) == one.turns[0].prompt.num_tokens


@pytest.mark.parametrize(
    ("field", "value"), [("rate", 0), ("length", -1), ("num_sessions", -1), ("most_gap_s", -0.5), ("most_tokens", 0)]
)
def test_a_shape_that_cannot_be_names_the_field(field, value):
    with pytest.raises(TraceError, match=f"{field} is {value}; allowed"):
        Shape(**{field: value})


def test_a_trace_of_turns_that_are_all_too_long_says_so():
    with pytest.raises(TraceError, match="no turn has at most 10 tokens"):
        shaped(synthetic(1), Shape(most_tokens=10))
