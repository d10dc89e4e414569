# SPDX-License-Identifier: Apache-2.0
"""Which marked fusions the run-time does in one kernel, for steps of what size; see ``kernels/comm``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tokenspeed_plugin.kernels.comm import limits
from tokenspeed_plugin.placement.module_spec import ModuleKind
from tokenspeed_plugin.placement.plan import Compute, FusionKind, Move

if TYPE_CHECKING:
    from tokenspeed_plugin.placement.graph import ModelGraph
    from tokenspeed_plugin.placement.plan import ModelPlan, SectionPlan

FUSED: Final = {
    FusionKind.ALL_REDUCE_ADD_NORM: "+add+norm",
    FusionKind.ALL_REDUCE_NORM: "+norm",
}
"""Fusions that there is a kernel for, and what it adds to the all-reduce."""

LINEAR_ENDS: Final = frozenset({ModuleKind.ATTENTION, ModuleKind.MLA, ModuleKind.MLP})
"""Modules whose last step is a linear layer over split columns."""


def fused_moves(section: SectionPlan) -> dict[int, str]:
    """Index of each all-reduce that is marked for the kernel, and what the kernel does with it."""
    return {fusion.steps[0]: FUSED[fusion.kind] for fusion in section.fusions if fusion.kind in FUSED}


def parts_of(graph: ModelGraph, plan: ModelPlan, section: SectionPlan, index: int) -> int:
    """Parts in which a marked all-reduce of a step runs under the linear layer in front of it, where that is asked for."""
    source = section.steps[index].reads[0]
    writer = next((step for step in section.steps if step.target == source), None)
    if not isinstance(writer, Compute) or graph.activation_bytes != 2:
        return 1
    ends_in_linear = graph.sections[section.section].node(writer.module).spec.kind in LINEAR_ENDS
    rows = plan.num_tokens // plan.mesh.size(plan.mesh.atoms("dp"))
    return limits.num_parts(rows) if ends_in_linear else 1


def fits_kernel(graph: ModelGraph, plan: ModelPlan, move: Move, gpus_per_node: int) -> bool:
    """Whether one launch takes an all-reduce of a step: its ranks are GPUs of one host, its rows and types the kernel's."""
    mesh = plan.mesh
    num_ranks, outermost = mesh.size(move.atoms), min(move.atoms)
    hidden = graph.sizes["hidden"]
    rows = plan.num_tokens // mesh.size(mesh.atoms("dp"))
    max_rows = limits.fitting_rows(hidden, num_ranks, rows)
    inside = mesh.stride(outermost) * mesh.atom_sizes[outermost] <= gpus_per_node
    taken = limits.refusal(hidden, "bfloat16", max_rows, num_ranks) is None
    return inside and taken and graph.activation_bytes == 2 and rows <= max_rows
