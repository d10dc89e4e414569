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
from tokenspeed_plugin.placement.cost import CostModel, CostTable, LinkCost, Sample, fit_link
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


def test_the_fit_recovers_latency_and_bandwidth() -> None:
    truth = LinkCost(latency_us=7.5, gbytes_per_s=320)
    sizes = [2**k for k in range(10, 28, 3)]
    fitted = fit_link([Sample(ring_bytes=n, time_us=truth.time_us(n)) for n in sizes])
    assert fitted.latency_us == pytest.approx(7.5)
    assert fitted.gbytes_per_s == pytest.approx(320)


def test_the_fit_never_gives_a_negative_latency() -> None:
    fitted = fit_link([Sample(ring_bytes=1e6, time_us=1.0), Sample(ring_bytes=2e6, time_us=4.0)])
    assert fitted.latency_us == 0


def test_the_fit_refuses_what_it_cannot_fit() -> None:
    with pytest.raises(PlacementError, match="3 samples of one size"):
        fit_link([Sample(ring_bytes=10, time_us=1)] * 3)
    with pytest.raises(PlacementError, match="time does not grow"):
        fit_link([Sample(ring_bytes=1e3, time_us=10), Sample(ring_bytes=1e6, time_us=9)])


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
