# SPDX-License-Identifier: Apache-2.0
"""Bytes by the ring formulas, times from a table, and the fit that turns measurements into a table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.placement.placement_cases import TABLE, model
from tokenspeed_plugin.placement import Conversion, PlacementError, PlacementSpec
from tokenspeed_plugin.placement.algebra import PARTIAL, REPLICATE, TOKENS
from tokenspeed_plugin.placement.conversion_path import primitives
from tokenspeed_plugin.placement.cost import CostModel, CostTable, LinkCost, LinkCurve, Sample, measured_link
from tokenspeed_plugin.placement.cost.cost_table import ring_bytes
from tokenspeed_plugin.placement.layout import spread
from tokenspeed_plugin.placement.models.blocks import HIDDEN
from tokenspeed_plugin.placement.module_spec import Port


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        (Conversion.ALL_REDUCE, 2),
        (Conversion.REDUCE_SCATTER, 1),
        (Conversion.ALL_GATHER, 1),
        (Conversion.ALL_TO_ALL, 1),
    ],
)
def test_ring_bytes(kind: Conversion, factor: int) -> None:
    assert ring_bytes(kind, 4, 1000) == factor * 750


def cost_of(source: object, target: object, num_tokens: int) -> float:
    graph = model("llama")
    mesh = PlacementSpec(4, 4).mesh(4, graph)
    cost = CostModel(graph, mesh, TABLE, num_tokens, 1)
    before, after = (spread(mesh, {"attn_tp": p}) for p in (source, target))  # type: ignore[dict-item]
    return sum(cost.move_bytes(p, Port(HIDDEN)) for p in primitives(before, after))


def test_uneven_tokens_are_charged_as_padded() -> None:
    """10 tokens over 4 ranks travel as 4 x 3 tokens of 32 bf16."""
    assert cost_of(TOKENS, REPLICATE, 10) == 3 / 4 * 10 * 32 * 2
    assert cost_of(PARTIAL, TOKENS, 10) == 3 / 4 * 10 * 32 * 2
    assert cost_of(PARTIAL, REPLICATE, 10) == 2 * 3 / 4 * 10 * 32 * 2


def test_a_measured_link_passes_its_samples_and_is_a_line_on_logarithmic_scales_between() -> None:
    link = measured_link([Sample(ring_bytes=n, time_us=t) for n, t in ((4e6, 40.0), (1e3, 5.0), (1e6, 10.0))])
    assert [link.time_us(n) for n in (1e3, 1e6, 4e6)] == pytest.approx([5.0, 10.0, 40.0])
    assert link.time_us(2e6) == pytest.approx(20.0)
    assert link.time_us(0) == link.time_us(10) == pytest.approx(5.0)
    assert link.time_us(8e6) == pytest.approx(80.0)


def test_a_measured_link_jumps_where_another_algorithm_begins() -> None:
    samples = [Sample(ring_bytes=n, time_us=t) for n, t in ((1e3, 2.0), (2e3, 4.0), (8e3, 40.0), (16e3, 80.0))]
    link = measured_link(samples, [4e3])
    assert link.time_us(3e3) == pytest.approx(6.0)
    assert link.time_us(4e3) == pytest.approx(20.0)
    assert link.time_us(32e3) == pytest.approx(160.0)
    assert link.time_us(1.0) == 2.0
    assert measured_link(samples, [1.5e3]).changes_at == ()
    assert measured_link(samples, [4e3, 9e3]).changes_at == (4e3,)
    with pytest.raises(
        ValueError, match=r"each algorithm of a link needs two measured sizes: .* changes at \(1500.0,\)"
    ):
        LinkCurve(samples=tuple(samples), changes_at=(1.5e3,))


def test_a_measured_link_is_near_a_latency_and_a_bandwidth_where_there_is_nothing_else() -> None:
    truth = LinkCost(latency_us=7.5, gbytes_per_s=320)
    link = measured_link([Sample(ring_bytes=2**k, time_us=truth.time_us(2**k)) for k in range(10, 28, 2)])
    for exponent in range(10, 27):
        assert link.time_us(1.5 * 2**exponent) == pytest.approx(truth.time_us(1.5 * 2**exponent), rel=0.07)


def test_samples_that_make_no_link_are_refused() -> None:
    with pytest.raises(PlacementError, match="3 samples of one size"):
        measured_link([Sample(ring_bytes=10, time_us=1)] * 3)
    with pytest.raises(PlacementError, match="time does not grow"):
        measured_link([Sample(ring_bytes=1e3, time_us=10), Sample(ring_bytes=1e6, time_us=9)])
    with pytest.raises(ValueError, match=r"must be positive and ascend, not \[2.0, 1.0\]"):
        LinkCurve(samples=(Sample(ring_bytes=2, time_us=1), Sample(ring_bytes=1, time_us=1)))


def test_the_shipped_table_says_that_links_are_estimates_until_measured() -> None:
    assert TABLE.source in ("estimate", "measured")
    assert TABLE.source == "measured" or "have not been measured" in TABLE.note


def test_a_group_over_more_than_a_node_uses_the_network() -> None:
    near = TABLE.link(Conversion.ALL_REDUCE, 8, inside_node=True)
    far = TABLE.link(Conversion.ALL_REDUCE, 8, inside_node=False)
    assert far.time_us(1e6) > near.time_us(1e6)


def test_a_table_with_an_unknown_field_or_a_missing_link_is_refused(tmp_path: Path) -> None:
    data = json.loads(TABLE.model_dump_json())
    wrong = tmp_path / "table.json"
    wrong.write_text(json.dumps({**data, "gpus": 8}))
    with pytest.raises(ValidationError, match="gpus"):
        CostTable.load(wrong)
    wrong.write_text(json.dumps({**data, "links": {"node": {}}}))
    with pytest.raises(PlacementError, match="has no all-reduce on link 'node'"):
        CostTable.load(wrong).link(Conversion.ALL_REDUCE, 2, inside_node=True)
