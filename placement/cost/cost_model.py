# SPDX-License-Identifier: Apache-2.0
"""Bytes and microseconds of conversions and modules for steps of one size."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from tokenspeed_plugin.placement.algebra import Conversion, Shard
from tokenspeed_plugin.placement.cost.cost_table import ring_bytes
from tokenspeed_plugin.placement.layout import Layout, local_length, sharded_atoms, spread
from tokenspeed_plugin.placement.module_spec import ModuleKind, ModuleSpec, Param, Port, Signature

if TYPE_CHECKING:
    from tokenspeed_plugin.placement.conversion_path import Primitive
    from tokenspeed_plugin.placement.cost.cost_table import CostTable
    from tokenspeed_plugin.placement.graph import ModelGraph
    from tokenspeed_plugin.placement.mesh import Mesh

TOKENWISE = (ModuleKind.NORM, ModuleKind.ADD, ModuleKind.SCALE)


@dataclass(frozen=True)
class CostModel:
    """Costs of one graph on one mesh for steps of ``num_tokens`` tokens (over all data-parallel ranks)."""

    graph: ModelGraph
    mesh: Mesh
    table: CostTable
    num_tokens: int
    num_rows: int
    quantised_gathers: bool = False
    """Whether the run-time quantises before a gather when the consumer would quantise after it."""

    def local_elements(self, port: Port, layout: Layout) -> int:
        """Elements of a value on one rank, parts padded to equal length."""
        return prod(self._local(dim, sharded_atoms(layout, i)) for i, dim in enumerate(port.dims))

    def _local(self, dim: str, atoms: tuple[int, ...]) -> int:
        return local_length(self.mesh, atoms, self.graph.length(dim, self.num_tokens, self.num_rows))

    def local_bytes(self, port: Port, layout: Layout, wire_bytes: float | None = None) -> float:
        """Bytes of a value on one rank; ``wire_bytes`` per element when it travels quantised."""
        size = self.graph.activation_bytes if wire_bytes is None else wire_bytes
        return self.local_elements(port, layout) * size

    def move_bytes(self, primitive: Primitive, port: Port, wire_bytes: float | None = None) -> float:
        """Ring-equivalent bytes that a rank sends; zero for local operations."""
        if not primitive.kind.is_collective:
            return 0.0
        gathers = primitive.kind is Conversion.ALL_GATHER
        whole = self.local_bytes(port, primitive.after if gathers else primitive.before, wire_bytes)
        return ring_bytes(primitive.kind, self.mesh.size(primitive.atoms), whole)

    def move_us(self, primitive: Primitive, port: Port, wire_bytes: float | None = None) -> float:
        """Time of one conversion step."""
        if not primitive.kind.is_collective:
            return self.table.kernel_launch_us + self._memory_us(2 * self.local_bytes(port, primitive.after))
        outermost = min(primitive.atoms)
        span = self.mesh.stride(outermost) * self.mesh.atom_sizes[outermost]
        link = self.table.link(
            primitive.kind, self.mesh.size(primitive.atoms), inside_node=span <= self.table.gpus_per_node
        )
        return link.time_us(self.move_bytes(primitive, port, wire_bytes))

    def fused_saving_us(self, port: Port, layout: Layout, reduced_over: int = 1) -> float:
        """What one kernel for two operations saves: a launch, and writing and reading the tensor between them.

        ``reduced_over`` is the number of ranks of an all-reduce that is one of the two; large ones cannot be fused.
        """
        size = self.local_bytes(port, layout)
        limit = self.table.fused_all_reduce_max_bytes.get(reduced_over, 0)
        if reduced_over > 1 and size > limit:
            return 0.0
        return self.table.kernel_launch_us + self._memory_us(2 * size)

    def compute_us(self, spec: ModuleSpec, signature: Signature) -> float:
        """Time of a module without attention's inner product: the larger of memory traffic and arithmetic."""
        moved = sum(self.local_bytes(p, s) for p, s in zip(spec.inputs, signature.inputs, strict=True))
        moved += self.local_bytes(spec.output, signature.output)
        if spec.kind in TOKENWISE or not spec.params:
            return self.table.kernel_launch_us + self._memory_us(moved)
        elements = sum(self.param_elements(p) for p in spec.params)
        tokens = self._local(spec.inputs[0].dims[0], sharded_atoms(signature.inputs[0], 0))
        touched = min(1.0, tokens * spec.active_fraction) if spec.active_fraction < 1 else 1.0
        flops = 2.0 * tokens * elements * spec.active_fraction
        memory_us = self._memory_us(moved + touched * elements * self.graph.weight_bytes)
        return self.table.kernel_launch_us + max(memory_us, flops / (self.table.matrix_tflops * 1e6))

    def param_elements(self, param: Param) -> int:
        """Elements of a parameter on one rank (the largest part when shards are uneven)."""
        layout = spread(self.mesh, param.placements)
        return prod(self._param_length(param, i, layout) for i in range(len(param.dims)))

    def _param_length(self, param: Param, index: int, layout: Layout) -> int:
        dim = param.dims[index]
        atoms = tuple(a for a, p in enumerate(layout) if p == Shard(index))
        if dim not in param.follows:
            return self._local(dim, atoms)
        leader, ratio = param.follows[dim]
        return -(-self._local(leader, atoms) // ratio)

    def weight_bytes(self) -> float:
        """Bytes of all parameters on one rank."""
        total = 0.0
        for name, count in self.graph.layer_counts.items():
            for node in self.graph.sections[name].nodes:
                total += count * self.graph.weight_bytes * sum(self.param_elements(p) for p in node.spec.params)
        return total

    def _memory_us(self, moved_bytes: float) -> float:
        return moved_bytes / (self.table.memory_gbytes_per_s * 1e3)
