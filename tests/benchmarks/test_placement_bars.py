# SPDX-License-Identifier: Apache-2.0
"""Bars of the placement benchmark: what they compare, and that nothing missing counts as met."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.placed.bars import fitted, placement_bars
from benchmarks.placed.systems import System, systems_of
from tokenspeed_plugin.placement import Conversion
from tokenspeed_plugin.placement.cost import CostTable, LinkCurve, Sample

EQUAL = {"requests": 2, "constant_answers": 0, "mismatches": []}
PARTED = {**EQUAL, "mismatches": [{"request": 1, "position": 2, "margin": 0.3}]}


def figures(ranks: int = 2, **placed: Any) -> dict[str, Any]:
    stock = {"decode_ms": {"1": 2.0, "128": 4.0}, "prefill_ms": 100.0}
    ours = {**stock, "tokens": EQUAL, "tokens_as_run": EQUAL, **placed}
    return {"ranks": ranks, "models": {"dense": {"stock": stock, "placed": ours}}, "links": {}}


def missed(found: dict[str, Any]) -> list[str]:
    return [str(outcome) for outcome in (bar.judge() for bar in placement_bars(found)) if not outcome.met]


def test_equal_figures_meet_the_bars_of_one_rank() -> None:
    assert missed(figures(ranks=1)) == []


@pytest.mark.parametrize(
    ("placed", "name"),
    [
        ({"decode_ms": {"1": 2.1, "128": 4.0}}, "decode at batch 1, speed over stock"),
        ({"decode_ms": {"1": 2.0, "128": 4.2}}, "decode at batch 128, speed over stock"),
        ({"prefill_ms": 103.0}, "prefill, speed over stock"),
        ({"tokens": PARTED}, "requests whose greedy tokens differ"),
        ({"tokens_as_run": PARTED}, "as it runs: log-probability between the tokens of stock and ours"),
    ],
)
def test_each_figure_can_miss_its_bar(placed: dict[str, Any], name: str) -> None:
    (line,) = missed(figures(1, **placed))
    assert name in line


def test_a_failed_engine_and_constant_answers_meet_nothing() -> None:
    found = figures(1)
    found["models"]["dense"]["placed"] = {"error": "out of memory"}
    assert all("out of memory" in line for line in missed(found))
    assert len(missed(found)) == 3
    constant = figures(1, tokens={**EQUAL, "constant_answers": 2})
    assert any("equality proves nothing" in line for line in missed(constant))


def test_two_ranks_may_part_where_both_tokens_are_as_likely() -> None:
    assert any("where answers part: 0.3" in line for line in missed(figures(tokens=PARTED)))
    unlikely = {"request": 0, "position": 0, "margin": 0.0, "margin_is_lower_bound": True}
    assert any("part: inf" in line for line in missed(figures(tokens={**EQUAL, "mismatches": [unlikely]})))
    near = {**EQUAL, "mismatches": [{"request": 0, "position": 1, "margin": 0.1}]}
    assert not any("where answers part" in line for line in missed(figures(tokens=near)))


def test_vllms_own_noise_is_the_measure_where_it_was_run() -> None:
    def answers(error: float, margin: float) -> dict[str, Any]:
        return {**EQUAL, "mismatches": [{"request": 0, "position": 1, "margin": margin}], "error": {"mean": error}}

    found = figures(tokens_as_run=answers(0.04, 0.4))
    assert any("where answers part: 0.4" in line for line in missed(found))
    found["models"]["dense"]["stock-unfused"] = {"tokens_as_run": answers(0.03, 0.5)}
    assert not any("as it runs" in line for line in missed(found))
    found["models"]["dense"]["placed"]["tokens_as_run"] = answers(0.05, 0.6)
    parted, noisier = (line for line in missed(found) if "as it runs" in line)
    assert "where answers part: 0.6" in parted
    assert "over stock-unfused's: 1.67" in noisier


def test_a_forced_split_is_judged_by_its_prefill_where_the_cost_model_chooses_it() -> None:
    split = {"prefill_ms": 99.0, "tokens": EQUAL, "tokens_as_run": EQUAL}
    found = figures()
    found["models"]["dense"]["placed-split"] = {**split, "picked": True}
    assert any("placed-split: prefill" in line and "1.02" in line for line in missed(found))
    found["models"]["dense"]["placed-split"] = {**split, "picked": False}
    assert not any("placed-split: prefill" in line for line in missed(found))


def test_the_cost_model_chooses_a_split_only_where_it_is_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu.models import MODELS
    from benchmarks.placed import choice
    from tokenspeed_plugin.placement.runtime import start

    class Tables:
        load = staticmethod(lambda: table)

    model = MODELS["dense"]
    measured = CostTable.load()
    kind = Conversion.ALL_REDUCE
    for factor, splits in ((1.0, False), (5.0, True)):
        slower = LinkCurve(
            samples=tuple(
                Sample(ring_bytes=s.ring_bytes, time_us=s.time_us * factor)
                for s in measured_link_of(measured, kind).samples
            )
        )
        table = measured.model_copy(
            update={"links": {**measured.links, "node": {**measured.links["node"], kind: {2: slower}}}}
        )
        monkeypatch.setattr(start, "CostTable", Tables)
        assert choice.splits_residual(model.name, model.config, 2, 8192) is splits


def measured_link_of(table: CostTable, kind: Conversion) -> LinkCurve:
    link = table.links["node"][kind][2]
    assert isinstance(link, LinkCurve)
    return link


def test_two_ranks_also_hold_the_table_against_its_measurement() -> None:
    found = figures()
    assert any("no link was measured" in line for line in missed(found))
    found["models"]["dense"]["stock"]["links"] = {
        kind: [(float(size), 5.0 + size / 1e5) for size in (1e4, 4e4, 16e4, 64e4)]
        for kind in ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")
    }
    table, found["links"] = fitted(found)
    assert table is not None
    assert table.source == "measured"
    assert {kind: len(errors) for kind, errors in found["links"].items()}["all-reduce"] == 2
    assert not any("cost table" in line for line in missed(found))
    found["models"]["dense"]["stock"]["links"]["all-gather"][2] = (16e4, 20.0)
    _, found["links"] = fitted(found)
    assert any("cost table" in line for line in missed(found))


def test_experts_are_compared_with_vllms_experts() -> None:
    assert systems_of("mla", 2)["placed-experts"] == System("attn=tp2,dense=tp2,moe=ep2", expert_parallel=True)
    assert set(systems_of("dense", 1)) == {"stock", "placed", "ours"}
    assert set(systems_of("mla", 2, "cpu")) == {
        "stock",
        "placed",
        "ours",
        "stock-unfused",
        "placed-unfused",
        "placed-overlap",
        "placed-split",
    }
