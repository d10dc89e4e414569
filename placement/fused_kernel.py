# SPDX-License-Identifier: Apache-2.0
"""Which marked fusions the run-time does in one kernel, for steps of what size; see ``kernels/comm``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tokenspeed_plugin.kernels.comm import limits
from tokenspeed_plugin.placement.plan import FusionKind, Move

if TYPE_CHECKING:
    from tokenspeed_plugin.placement.graph import ModelGraph
    from tokenspeed_plugin.placement.plan import ModelPlan, SectionPlan

FUSED: Final = {
    FusionKind.ALL_REDUCE_ADD_NORM: "+add+norm",
    FusionKind.ALL_REDUCE_NORM: "+norm",
}
"""Fusions that there is a kernel for, and what it adds to the all-reduce."""


def fused_moves(section: SectionPlan) -> dict[int, str]:
    """Index of each all-reduce that is marked for the kernel, and what the kernel does with it."""
    return {fusion.steps[0]: FUSED[fusion.kind] for fusion in section.fusions if fusion.kind in FUSED}


def fits_kernel(graph: ModelGraph, plan: ModelPlan, move: Move, gpus_per_node: int) -> bool:
    """Whether one launch takes an all-reduce of a step: its ranks are GPUs of one host, its rows and types the kernel's."""
    mesh = plan.mesh
    num_ranks, outermost = mesh.size(move.atoms), min(move.atoms)
    hidden = graph.sizes["hidden"]
    max_rows = limits.fitting_rows(hidden, num_ranks)
    rows = plan.num_tokens // mesh.size(mesh.atoms("dp"))
    inside = mesh.stride(outermost) * mesh.atom_sizes[outermost] <= gpus_per_node
    taken = limits.refusal(hidden, "bfloat16", max_rows, num_ranks) is None
    return inside and taken and graph.activation_bytes == 2 and rows <= max_rows
