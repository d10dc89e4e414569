# SPDX-License-Identifier: Apache-2.0
"""A bar missed is exit code 1 and a line; a bar that was not measured counts as missed."""

import json

import pytest

from benchmarks import control_plane
from benchmarks.control import bars
from benchmarks.control.bars import Contest, all_bars
from benchmarks.control.figures import Figures, medians
from benchmarks.gpu.bars import throughput_bars
from benchmarks.report import Bar, MissingFigureError, exit_code, write_json


def missing():
    raise MissingFigureError("tokenspeed not installed")


@pytest.mark.parametrize(
    ("relation", "measured", "met"),
    [("<=", 0.1, True), ("<=", 0.11, False), ("<", 0.1, False), (">=", 2.0, True), (">=", 1.99, False)],
)
def test_bar_holds_its_relation_at_the_limit(relation, measured, met):
    limit = 2.0 if relation == ">=" else 0.1
    assert Bar("claim", relation, limit, lambda: measured).judge().met is met


def test_missed_and_unmeasured_bars_each_print_a_line_and_fail(capsys):
    outcomes = [
        Bar("good", "<=", 1.0, lambda: 0.5).judge(),
        Bar("slow", "<=", 0.1, lambda: 0.4).judge(),
        Bar("peer", "<=", 0.25, missing).judge(),
        Bar("empty", "<=", 0.25, lambda: float("nan")).judge(),
    ]
    assert exit_code(outcomes, check=True) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bar not met: ")]
    assert lines == [
        "bar not met: slow: 0.4 (must be <= 0.1)",
        "bar not met: peer: not checked: tokenspeed not installed (must be <= 0.25)",
        "bar not met: empty: not a number (must be <= 0.25)",
    ]
    assert exit_code(outcomes, check=False) == 0


def test_check_passes_only_when_there_are_bars_and_all_are_met():
    assert exit_code([Bar("good", "<=", 1.0, lambda: 0.5).judge()], check=True) == 0
    assert exit_code([], check=True) == 1


def full_figures(ours_factor):
    """Figures of a run in which ours costs `ours_factor` of vLLM's in everything."""
    figures = Figures()
    for cell in bars.FULL_CELLS:
        vllm = {
            "step_p50_us": 1000.0 * (4 if "N=1024" in cell else 1),
            "step_p99_us": 2000.0,
            "step_max_us": 9000.0,
            "control_s_per_1k_tokens": 0.1,
            "hit_rate": 0.989,
            "cold_p50_us": 9000.0,
            "warm_p50_us": 13000.0,
        }
        ours = {key: value if key == "hit_rate" else value * ours_factor for key, value in vllm.items()}
        figures.reps[cell] = {"vllm": [vllm], "tokenspeed": [vllm], "ours": [ours]}
    figures.instructions = dict.fromkeys((bars.BASE, bars.LONG_WAIT, bars.NOBODY_WAITS), 1000.0)
    figures.instructions |= dict.fromkeys(bars.DOUBLED.values(), 1000.0)
    return figures


def judged(figures):
    return [entry.bar.judge() for entry in all_bars(figures, Contest())]


def test_every_bar_is_met_by_a_plane_of_a_twentieth_of_the_cost():
    outcomes = judged(full_figures(0.05))
    assert [str(outcome) for outcome in outcomes if not outcome.met] == []
    assert len(outcomes) == 28


def test_bars_of_the_cost_table_have_their_limits():
    limits = {outcome.claim: round(1 / outcome.limit) for outcome in judged(full_figures(1.0)) if 0 < outcome.limit < 1}
    per_claim = {
        (claim.partition(": ")[0].partition(",")[0], claim.rpartition(": ")[2]): v for claim, v in limits.items()
    }
    assert per_claim[("decode:N=256", "step p50 over vLLM's")] == 10
    assert per_claim[("decode:N=256", "step p99 over vLLM's")] == 5
    assert per_claim[("decode:N=256", "first bar, step p50 over vLLM's")] == 3
    assert per_claim[("decode:N=256", "step p50 over tokenspeed-scheduler's")] == 4
    assert per_claim[("decode:N=1024", "step p50 over vLLM's")] == 12
    assert per_claim[("agentic:S=64", "CPU seconds per 1k tokens over vLLM's")] == 5
    assert per_claim[("admit64k:bs=16", "cold, add + first plan over vLLM's")] == 6
    assert per_claim[("decode_pressure:N=128", "step p99 over vLLM's")] == 3


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        (lambda f: f.instructions.update({bars.LONG_WAIT: 1100.0}), "4 prompts of 64K wait for memory"),
        (lambda f: f.instructions.update({bars.DOUBLED["pool size"]: 1100.0}), "pool size doubled"),
        (lambda f: f.reps[bars.agentic_cell(64)]["ours"][0].update(hit_rate=0.98), "hit rate minus vLLM's"),
        (lambda f: f.reps[bars.PRESSURE]["ours"][0].update(step_max_us=5001.0), "longest step of ours"),
        (lambda f: f.reps[bars.decode_cell(1024, 64)]["ours"][0].update(step_p50_us=201.0), "per request"),
        (lambda f: f.missing.update(tokenspeed="not installed"), "tokenspeed-scheduler's: not checked"),
        (lambda f: f.reps[bars.decode_cell(256, 16)]["ours"].append({"error": "boom"}), "boom"),
    ],
)
def test_one_worse_figure_misses_its_bar(change, claim):
    figures = full_figures(0.05)
    change(figures)
    missed = [str(outcome) for outcome in judged(figures) if not outcome.met]
    assert missed
    assert any(claim in line for line in missed)


def test_time_of_other_threads_is_added_to_the_step():
    rep = {"step_p50_us": 100.0, "step_p99_us": 200.0, "other_threads_us_per_step": 30.0}
    assert medians([rep])["step_p50_us"] == 130.0


def test_longest_step_is_the_maximum_over_the_reps_and_the_rest_are_medians():
    reps = [{"step_max_us": value, "step_p50_us": value} for value in (3.0, 9.0, 4.0)]
    assert medians(reps) == {"step_max_us": 9.0, "step_p50_us": 4.0}


def gpu_figures(ratio, **tokens):
    counts = {str(n): {"stock": {"tokens_per_s": 100.0}, "ours": {"tokens_per_s": 100.0 * ratio}} for n in (1, 64, 256)}
    part = {"requests": 4, "constant_answers": 0, "batch_invariant": True, "mismatches": [], **tokens}
    return {"dense": {"engine": {"counts": counts}, "tokens": part}}


def missed_gpu_bars(figures):
    return [str(outcome) for outcome in (bar.judge() for bar in throughput_bars(figures)) if not outcome.met]


def test_gpu_bars_are_two_fold_at_256_and_not_slower_at_one():
    assert missed_gpu_bars(gpu_figures(2.0)) == []
    assert len(missed_gpu_bars(gpu_figures(1.5))) == 1
    assert len(missed_gpu_bars(gpu_figures(0.99))) == 3


@pytest.mark.parametrize(
    "tokens",
    [
        {"mismatches": [{"request": 1, "margin": 0.5}]},
        {"mismatches": [{"request": 1, "margin": 0.5}], "batch_invariant": False},
        {"constant_answers": 3},
        {"error": "not run: 3 s left of 540"},
    ],
)
def test_gpu_token_bar_is_missed_by_mismatches_and_by_empty_evidence(tokens):
    assert len(missed_gpu_bars(gpu_figures(2.0, **tokens))) == 1


def test_json_holds_machine_figures_and_bars(tmp_path):
    path = tmp_path / "figures.json"
    write_json(str(path), {"cells": {"a": 1}}, [Bar("slow", "<=", 0.1, lambda: 0.4).judge()])
    document = json.loads(path.read_text())
    assert document["cells"] == {"a": 1}
    assert document["bars"][0]["met"] is False
    assert document["machine"]["cores"] >= 1


def test_bad_cell_on_the_command_line_ends_the_run_with_its_name(capsys):
    with pytest.raises(SystemExit):
        control_plane.parse_arguments(["--cells", "decode:N=4,bs=16,speed=9"])
    assert "key 'speed' is not one of" in capsys.readouterr().err
