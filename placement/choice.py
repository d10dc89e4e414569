# SPDX-License-Identifier: Apache-2.0
"""``--placement auto``: the cheapest specification that vLLM's layers can run and that fits the memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from tokenspeed_plugin.placement.algebra import PlacementError
from tokenspeed_plugin.placement.compiler import Compiler
from tokenspeed_plugin.placement.cost import CostModel, CostTable
from tokenspeed_plugin.placement.spec import PlacementSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenspeed_plugin.placement.graph import ModelGraph

Check: TypeAlias = "Callable[[PlacementSpec], None]"

WEIGHT_SHARE: Final = 0.85
"""Largest share of the memory that weights may take; the rest is for KV cache and activations."""
DECODE_TOKENS: Final = 32
PREFILL_TOKENS: Final = 8192
DECODES_PER_PREFILL: Final = 256
"""One prefill step of PREFILL_TOKENS is weighed against this many decode steps of DECODE_TOKENS."""


@dataclass(frozen=True)
class Candidate:
    """A specification and why it is in or out."""

    spec: PlacementSpec
    time_us: float
    refused: str | None = None


def candidates(
    graph: ModelGraph, world_size: int, table: CostTable, check: Check | None = None
) -> tuple[Candidate, ...]:
    """Every specification of a run-time with one tensor-parallel group of ``world_size``, cheapest first.

    ``check`` raises PlacementError for what the run-time at hand cannot do.
    """
    tried: list[Candidate] = []
    has_experts = "ep" in graph.axes
    for attn in sorted({world_size, 1}, reverse=True):
        for dense in sorted({world_size, 1}, reverse=True):
            for moe_tp, ep in (
                ((world_size, 1), (1, world_size)) if has_experts and world_size > 1 else ((world_size, 1),)
            ):
                tried.append(_try(graph, PlacementSpec(attn, dense, moe_tp, ep), world_size, table, check))
    return tuple(sorted(tried, key=lambda c: (c.refused is not None, c.time_us)))


def choose(graph: ModelGraph, world_size: int, table: CostTable, check: Check | None = None) -> PlacementSpec:
    """The cheapest of :func:`candidates`.

    Raises:
        PlacementError: none fits; the message gives the reason for each.
    """
    found = candidates(graph, world_size, table, check)
    if found[0].refused is not None:
        reasons = "; ".join(dict.fromkeys(str(c.refused) for c in found))
        message = f"--placement 'auto': nothing fits {graph.name!r} on {world_size} ranks: {reasons}"
        raise PlacementError(message)
    return found[0].spec


def _try(graph: ModelGraph, spec: PlacementSpec, world_size: int, table: CostTable, check: Check | None) -> Candidate:
    try:
        if check is not None:
            check(spec)
        spec.check_model(graph)
        mesh = spec.mesh(world_size, graph, data_parallel=1)
    except PlacementError as error:
        return Candidate(spec, 0.0, str(error))
    weight_bytes = CostModel(graph, mesh, table, 1, 1).weight_bytes()
    if weight_bytes > WEIGHT_SHARE * table.memory_bytes:
        allowed = f"{WEIGHT_SHARE:.0%} of {table.memory_bytes / 1e9:.0f} GB"
        return Candidate(
            spec, 0.0, f"--placement '{spec}': {weight_bytes / 1e9:.0f} GB of weights per rank, over {allowed}"
        )
    decode = Compiler(CostModel(graph, mesh, table, DECODE_TOKENS, DECODE_TOKENS)).compile().time_us
    prefill = Compiler(CostModel(graph, mesh, table, PREFILL_TOKENS, 1)).compile().time_us
    return Candidate(spec, DECODES_PER_PREFILL * decode + prefill)
