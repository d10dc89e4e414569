# SPDX-License-Identifier: Apache-2.0
"""What a placement does to a model, as data: plans by step size, each collective, and vLLM's own model beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenspeed_plugin.placement.baseline import Baseline
from tokenspeed_plugin.placement.compiler import Compiler
from tokenspeed_plugin.placement.cost import CostModel, CostTable
from tokenspeed_plugin.placement.fused_kernel import fits_kernel, fused_moves, parts_of
from tokenspeed_plugin.placement.plan import Move
from tokenspeed_plugin.placement.residual import Residual
from tokenspeed_plugin.placement.verifier import verify

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenspeed_plugin.placement.graph import ModelGraph
    from tokenspeed_plugin.placement.plan import ModelPlan
    from tokenspeed_plugin.placement.spec import PlacementSpec


@dataclass(frozen=True)
class Step:
    """Size of one step over all data-parallel ranks: tokens, and rows that get logits."""

    num_tokens: int
    num_rows: int

    def __str__(self) -> str:
        kind = "decode" if self.num_tokens == self.num_rows else "prefill"
        return f"{kind} {self.num_tokens}"


@dataclass(frozen=True)
class CollectiveRow:
    """One collective of one section, repeated ``times`` per forward pass.

    ``fused`` says what the same kernel does with it, where the kernel can be had, and ``parts`` in how many parts it runs under
    the linear layer in front of it; ``time_us`` leaves both out.
    """

    section: str
    times: int
    collective: str
    axis: str
    num_ranks: int
    what: str
    ring_bytes: float
    time_us: float
    fused: str = ""
    parts: int = 1


@dataclass(frozen=True)
class StepExplanation:
    """The plan for one step size and its counterpart."""

    step: Step
    plan: ModelPlan
    residual: str
    ours: tuple[CollectiveRow, ...]
    baseline: tuple[CollectiveRow, ...]

    @property
    def totals(self) -> dict[str, dict[str, float]]:
        """Collectives, bytes and microseconds per forward pass for both."""
        return {"ours": _total(self.ours), "vllm": _total(self.baseline)}


@dataclass(frozen=True)
class Explanation:
    """All step sizes of one model and specification. Every plan in it has passed the verifier."""

    graph: ModelGraph
    spec: PlacementSpec
    world_size: int
    baseline_configuration: str
    table: CostTable
    steps: tuple[StepExplanation, ...]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "model": self.graph.name,
            "family": self.graph.family,
            "spec": str(self.spec),
            "world_size": self.world_size,
            "vllm": self.baseline_configuration,
            "cost_table": {"device": self.table.device, "source": self.table.source, "note": self.table.note},
            "steps": [
                {
                    "num_tokens": s.step.num_tokens,
                    "num_rows": s.step.num_rows,
                    "residual": s.residual,
                    "token_multiple": s.plan.token_multiple,
                    "totals": s.totals,
                    "ours": [vars(row) for row in s.ours],
                    "vllm": [vars(row) for row in s.baseline],
                }
                for s in self.steps
            ],
        }


def explain(
    graph: ModelGraph,
    spec: PlacementSpec,
    world_size: int,
    steps: Sequence[Step],
    *,
    table: CostTable | None = None,
    residual: Residual = Residual.AUTO,
    overlaps: bool = False,
) -> Explanation:
    """Compile, verify and price ``spec`` for every step size; ``overlaps``: say what an overlap would take.

    Raises:
        PlacementError: the model does not fit the specification; the message names the number.
    """
    table = table or CostTable.load()
    spec.check_model(graph)
    mesh = spec.mesh(world_size, graph)
    explained = []
    for step in steps:
        plan = Compiler(CostModel(graph, mesh, table, step.num_tokens, step.num_rows), residual).compile()
        verify(graph, plan)
        baseline = Baseline(graph, spec, world_size, step.num_tokens, step.num_rows)
        ours, theirs = tuple(_our_rows(graph, plan, table, overlaps)), tuple(_baseline_rows(graph, baseline, table))
        explained.append(StepExplanation(step, plan, _residual_name(plan), ours, theirs))
    configuration = Baseline(graph, spec, world_size, 1, 1).configuration
    return Explanation(graph, spec, world_size, configuration, table, tuple(explained))


def _our_rows(graph: ModelGraph, plan: ModelPlan, table: CostTable, overlaps: bool) -> Iterator[CollectiveRow]:
    for section, times in plan.distinct():
        marked = fused_moves(section)
        for index, move in enumerate(section.steps):
            if not isinstance(move, Move) or not move.is_collective:
                continue
            fits = index in marked and fits_kernel(graph, plan, move, table.gpus_per_node)
            yield CollectiveRow(
                section.section,
                times,
                move.kind.value,
                plan.mesh.label(move.atoms),
                plan.mesh.size(move.atoms),
                move.value,
                move.ring_bytes,
                move.time_us,
                marked[index] if fits else "",
                parts_of(graph, plan, section, index) if overlaps and index in marked else 1,
            )


def _baseline_rows(graph: ModelGraph, baseline: Baseline, table: CostTable) -> Iterator[CollectiveRow]:
    for name, times in graph.layer_counts.items():
        for c in baseline.section(name):
            us = c.time_us(table)
            yield CollectiveRow(name, times, c.kind.value, "vllm", c.num_ranks, c.what, c.ring_bytes, us)


def _residual_name(plan: ModelPlan) -> str:
    """How most layers keep the residual stream over the attention group."""
    layouts = [section.exit for section in plan.sections[1:-1]]
    split = sum(any(str(layout[a]) == "S0" for a in plan.mesh.atoms("attn_tp")) for layout in layouts)
    return "split by tokens" if 2 * split > len(layouts) else "replicated"


def _total(rows: Sequence[CollectiveRow]) -> dict[str, float]:
    return {
        "collectives": sum(r.times for r in rows),
        "ring_bytes": sum(r.times * r.ring_bytes for r in rows),
        "time_us": sum(r.times * r.time_us for r in rows),
    }
