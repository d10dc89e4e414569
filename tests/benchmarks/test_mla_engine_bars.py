# SPDX-License-Identifier: Apache-2.0
"""Bars of MLA kernels in whole engines: what they compare, and that nothing missing counts as met."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.served.answers import logprob_error
from benchmarks.served.bars import engine_bars, predicted_ms
from benchmarks.served.systems import control as control_of

EQUAL = {"requests": 4, "constant_answers": 0, "mismatches": []}


def figures(**changes: Any) -> dict[str, Any]:
    """Eight layers; ours saves 10, 6 and -4 microseconds in each; steps of 0.6, 1.0 and 4.0 ms."""
    taken = {"taken": True, "reason": ""}
    stock = {"1": {"graph_ms": 0.6}, "4": {"graph_ms": 1.0}, "16": {"graph_ms": 4.0}}
    ours = {"1": {"graph_ms": 0.52}, "4": {"graph_ms": 0.952}, "16": {"graph_ms": 4.03}}
    found = {
        "sessions": [1, 4, 16],
        "layers": 8,
        "engines": {
            "stock": {"decode": stock, "decode_alike": stock},
            "ours": {"decode": ours, "decode_alike": ours, "who": {"choices": {"1": taken, "4": taken, "16": taken}}},
        },
        "kernels_us": {
            "1": {"ours": 28.0, "flashattn3": 38.0},
            "4": {"ours": 80.0, "flashattn3": 86.0},
            "16": {"ours": 299.0, "flashattn3": 295.0},
        },
        "tokens": {"ours": EQUAL},
        "long_tokens": {"ours": EQUAL},
    }
    return {**found, **changes}


def missed(found: dict[str, Any]) -> list[str]:
    return [str(outcome) for outcome in (bar.judge() for bar in engine_bars(found)) if not outcome.met]


def test_these_figures_meet_all_bars() -> None:
    assert missed(figures()) == []
    assert len(engine_bars(figures())) == 3 + 1 + 2 + 2  # 16 sessions promise nothing


def with_graph_ms(count: str, graph_ms: float) -> dict[str, Any]:
    found = figures()
    for part in ("decode", "decode_alike"):
        found["engines"]["ours"][part] = {**found["engines"]["ours"][part], count: {"graph_ms": graph_ms}}
    return found


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        (with_graph_ms("16", 4.05), ["16 sessions: time of the decode graph"]),
        (with_graph_ms("1", 0.545), ["1 session, same experts: saving of a step over what the kernels promise: 0.687"]),
        (with_graph_ms("1", 0.56), ["1 session: time of the decode graph, ours over stock: 0.933", "0.5 (must"]),
        (with_graph_ms("4", 0.97), ["4 sessions, same experts: saving of a step"]),
    ],
)
def test_each_figure_can_miss_its_bar(found: dict[str, Any], lines: list[str]) -> None:
    got = missed(found)
    assert len(got) == len(lines)
    assert all(line in text for line, text in zip(lines, got, strict=True))


def test_a_batch_that_stays_with_vllm_promises_nothing() -> None:
    found = figures()
    found["engines"]["ours"]["who"]["choices"]["1"] = {"taken": False, "reason": ""}
    assert predicted_ms(found, 1) == 0.0
    assert not any("1 session, same experts" in bar.claim for bar in engine_bars(found))


def test_what_failed_meets_nothing() -> None:
    dead = figures(tokens={}, long_tokens={})
    dead["engines"]["ours"] = {"error": "out of memory"}
    assert len(missed(dead)) == len(engine_bars(dead)) == 3 + 1 + 3 + 2
    assert all("out of memory" in line for line in missed(dead))
    untimed = figures(kernels_us={}, kernels_error="no FlashAttention 3")
    assert [line for line in missed(untimed) if "no FlashAttention 3" in line] == missed(untimed) != []
    constant = figures(tokens={"ours": {**EQUAL, "constant_answers": 3}})
    assert any("equality proves nothing" in line for line in missed(constant))


def test_answers_may_part_where_both_tokens_are_as_likely() -> None:
    near = {**EQUAL, "mismatches": [{"request": 1, "position": 3, "margin": 0.1}]}
    assert missed(figures(tokens={"ours": near})) == []
    far = {**EQUAL, "mismatches": [{"request": 1, "position": 3, "margin": 0.2}]}
    assert "where answers part: 0.2" in missed(figures(long_tokens={"ours": far}))[0]
    unlikely = {**EQUAL, "mismatches": [{"request": 1, "position": 3, "margin": 0.0, "margin_is_lower_bound": True}]}
    assert "where answers part: inf" in missed(figures(tokens={"ours": unlikely}))[0]


def test_another_kernel_of_vllms_own_is_the_measure_where_it_ran() -> None:
    def with_control(error: float, margin: float) -> dict[str, Any]:
        part = {"request": 0, "position": 3, "margin": 0.3}
        control = {**EQUAL, "mismatches": [{**part, "margin": margin}], "error": {"mean": 0.02}}
        own = {**EQUAL, "mismatches": [part], "error": {"mean": error}}
        return figures(tokens={"ours": own, control_of("auto"): control})

    assert missed(with_control(0.025, 0.31)) == []
    assert missed(with_control(0.025, float("inf"))) != []
    assert (
        "tokens: log-probability between stock's and ours where answers part: 0.3"
        in missed(with_control(0.025, 0.2))[0]
    )
    assert "ours over FlashMLA's: 1.55" in missed(with_control(0.031, 0.31))[0]


def test_the_error_counts_positions_before_answers_part() -> None:
    stock = [{"tokens": [5, 6, 7], "best": [[[5, -0.1], [9, -2.0]], [[6, -0.5], [9, -1.0]], [[7, -0.3], [9, -1.0]]]}]
    ours = [{"tokens": [5, 9, 1], "best": [[[5, -0.2], [9, -1.9]], [[9, -0.6], [6, -0.7]], [[1, -0.3], [2, -1.0]]]}]
    error = logprob_error(stock, ours)
    assert error["positions"] == 2
    assert error["mean"] == pytest.approx(0.15)
    assert error["largest"] == pytest.approx(0.2)
    assert math.isnan(logprob_error([], [])["mean"])


def with_drafts(graph_ms: float, margin: float, alone: float = 0.0) -> dict[str, Any]:
    found = figures(drafts=[3], draft_sessions=[1])
    found["engines"]["stock-drafts3"] = {"decode": {"1": {"graph_ms": 0.8}}}
    found["engines"]["ours-drafts3"] = {"decode": {"1": {"graph_ms": graph_ms}}}
    parted, parted_alone = ({**EQUAL, "mismatches": [{"request": 1, "margin": m}]} for m in (margin, alone))
    found["tokens_drafts3"] = {"ours-drafts3": parted, "stock": parted_alone}
    return found


def test_drafts_have_bars_of_their_own() -> None:
    assert missed(with_drafts(0.7, 0.1)) == []
    assert "3 drafts, 1 session: time of the decode graph, ours over stock: 1.02" in missed(with_drafts(0.82, 0.1))[0]
    assert "tokens drafts3" in missed(with_drafts(0.7, 0.2))[0]
    assert missed(with_drafts(0.7, 0.2, alone=0.25)) == []
    dead = with_drafts(0.7, 0.1)
    dead["engines"]["ours-drafts3"] = {"error": "no n-grams"}
    dead["tokens_drafts3"] = {}
    assert len(missed(dead)) == 2
    assert all("no n-grams" in line for line in missed(dead))


def with_contexts(last_ms: float, bandwidth: float | None = 4e12) -> dict[str, Any]:
    """Of 128K to 1M: 8 layers read 8.5 GB more, 2.11 ms at 4 TB/s."""
    found = figures(contexts=[1 << 20, 128 << 10])
    stock = {str(128 << 10): 1.2, str(1 << 20): 4.0}
    ours = {str(128 << 10): 1.1, str(1 << 20): last_ms}
    for system, times in (("stock", stock), ("ours", ours)):
        found["engines"][system]["decode_long"] = {k: {"graph_ms": v, "step_ms": v + 0.5} for k, v in times.items()}
    if bandwidth:
        found["kernels_us"]["1"] |= {"bytes_per_s": bandwidth}
    return found


def test_a_longer_context_may_cost_what_reading_it_costs_and_a_sixth_more() -> None:
    assert missed(with_contexts(1.1 + 2.2)) == []
    lines = missed(with_contexts(3.8))
    assert [line.partition(":")[0] for line in lines] == ["context of 128K to 1024K"]
    assert "growth of the decode graph over what the floor says: 1.18" in lines[0]
    lines = missed(with_contexts(4.5))
    assert len(lines) == 3
    assert "context of 1024K: time of the decode graph, ours over stock: 1.12" in lines[0]
    assert "fall of decode throughput over what the floor says: 1.35" in lines[1]


def test_a_floor_needs_the_bandwidth_and_both_ends() -> None:
    unknown = with_contexts(3.3, bandwidth=None)
    unknown |= {"kernels_us": {}, "kernels_error": "no nvcc"}
    assert sum("bandwidth was not measured: no nvcc" in line for line in missed(unknown)) == 2
    short = with_contexts(3.3)
    del short["engines"]["ours"]["decode_long"][str(1 << 20)]
    assert sum("replayed no decode graph of a context of 1048576 tokens" in line for line in missed(short)) == 3


def with_append(graph_ms: float, margin: float = 0.0) -> dict[str, Any]:
    found = figures(append="triton")
    graphs = {"1": graph_ms, "4": 0.95, "16": 4.0}
    found["engines"]["ours-append"] = {"decode": {count: {"graph_ms": ms} for count, ms in graphs.items()}}
    found["tokens"] = {"ours": EQUAL, "ours-append": {**EQUAL, "mismatches": [{"request": 1, "margin": margin}]}}
    return found


def test_a_fused_append_may_not_make_a_step_longer_than_ours_without_it() -> None:
    assert missed(with_append(0.5)) == []
    assert "1 session, append fused: time of the decode graph, over ours without: 1.02" in missed(with_append(0.53))[0]
    lines = missed(with_append(0.5, margin=0.2))
    assert len(lines) == 1
    assert "tokens, append fused: log-probability between stock's and ours where answers part: 0.2" in lines[0]
    turns = with_append(0.5) | {"returning": [512], "returning_tokens": {"ours": EQUAL}}
    for system, forward_ms in (("stock", 20.0), ("ours", 15.0), ("ours-append", 16.0)):
        turns["engines"][system]["returning_turns"] = {"512": {"forward_ms": forward_ms}}
    claim = "a turn of 512 new tokens, append fused: its forward pass, over ours without: 1.07"
    assert [line for line in missed(turns) if claim in line] == missed(turns) != []
    dead = with_append(0.5)
    dead["engines"]["ours-append"] = {"error": "no Triton"}
    del dead["tokens"]["ours-append"]
    assert len(missed(dead)) == 4
    assert all("no Triton" in line for line in missed(dead))


def with_turns(ours_ms: float) -> dict[str, Any]:
    found = figures(returning=[512], returning_tokens={"ours": EQUAL})
    for system, forward_ms in (("stock", 20.0), ("ours", ours_ms)):
        found["engines"][system]["returning_turns"] = {"512": {"forward_ms": forward_ms, "ttft_ms": 30.0}}
    return found


def test_a_turn_that_comes_back_may_not_take_longer() -> None:
    assert missed(with_turns(14.0)) == []
    assert "a turn of 512 new tokens: its forward pass, ours over stock: 1.05" in missed(with_turns(21.0))[0]
    untimed = with_turns(14.0)
    untimed["engines"]["stock"]["returning_turns"] = {"512": {"ttft_ms": 30.0}}
    assert "stock timed no forward pass of a turn of 512 new tokens" in missed(untimed)[0]
    assert "the answers were not compared" in missed(with_turns(14.0) | {"returning_tokens": {}})[0]
