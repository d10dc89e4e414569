# SPDX-License-Identifier: Apache-2.0
"""The collectives of vLLM's hand-written models, to hold a plan against.

Read in vLLM 0.33.0 (``model_executor/models/{llama,qwen3_moe,deepseek_v2,gpt_oss,gemma3}.py``, ``layers/fused_moe/runner``,
``layers/vocab_parallel_embedding.py``, the default all-to-all backend ``allgather_reducescatter``): an all-reduce after
the embedding, after attention and after the MLP or MoE, logits gathered; with data and expert parallelism the tokens of
an MoE are gathered over the expert group and its output is reduce-scattered. vLLM has one tensor-parallel size for
attention and dense layers, so a specification with two is held against the larger one. Routing data that the dispatch
also sends is left out, in vLLM's favour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tokenspeed_plugin.placement.algebra import Conversion
from tokenspeed_plugin.placement.cost.cost_table import CostTable, ring_bytes
from tokenspeed_plugin.placement.module_spec import ModuleKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenspeed_plugin.placement.graph import ModelGraph, Section
    from tokenspeed_plugin.placement.spec import PlacementSpec

SHARDS_RESIDUAL: Final = frozenset({"deepseek"})
"""Families whose hand-written model splits the residual by tokens when data, tensor and expert parallelism meet."""


@dataclass(frozen=True)
class BaselineCollective:
    """One collective of the hand-written model over ``num_ranks`` ranks that are ``stride`` apart."""

    kind: Conversion
    what: str
    num_ranks: int
    stride: int
    whole_bytes: float

    @property
    def ring_bytes(self) -> float:
        """Bytes that each rank sends, as a ring would."""
        return ring_bytes(self.kind, self.num_ranks, self.whole_bytes)

    def time_us(self, table: CostTable) -> float:
        """Estimated time."""
        inside = self.num_ranks * self.stride <= table.gpus_per_node
        return table.link(self.kind, self.num_ranks, inside_node=inside).time_us(self.ring_bytes)


class Baseline:
    """vLLM's collectives for one model, specification and step size."""

    def __init__(self, graph: ModelGraph, spec: PlacementSpec, world_size: int, num_tokens: int, num_rows: int) -> None:
        self._graph = graph
        self._tp = max(spec.attn_tp, spec.dense_tp)
        self._dp = world_size // self._tp
        self._world_size = world_size
        self._expert_parallel = spec.ep > 1
        self._num_rows = num_rows
        self._all_bytes = num_tokens * graph.sizes["hidden"] * graph.activation_bytes
        self._own_bytes = -(-num_tokens // self._dp) * graph.sizes["hidden"] * graph.activation_bytes

    @property
    def configuration(self) -> str:
        """The vLLM options that it stands for."""
        expert = " --enable-expert-parallel" if self._expert_parallel else ""
        return f"-tp {self._tp} -dp {self._dp}{expert}"

    def section(self, name: str) -> tuple[BaselineCollective, ...]:
        """Collectives of one run of section ``name``; groups of one rank are left out."""
        found = self._section(self._graph.sections[name])
        return tuple(c for c in found if c.num_ranks > 1)

    def _section(self, section: Section) -> Iterator[BaselineCollective]:
        has_experts = any(node.spec.kind is ModuleKind.MOE for node in section.nodes)
        scattered = has_experts and self._splits_tokens and self._graph.family in SHARDS_RESIDUAL
        for node in section.nodes:
            kind = node.spec.kind
            if kind is ModuleKind.EMBEDDING:
                yield self._own(Conversion.ALL_REDUCE, "embedding")
            elif kind in (ModuleKind.ATTENTION, ModuleKind.MLA):
                yield self._own(Conversion.REDUCE_SCATTER if scattered else Conversion.ALL_REDUCE, "attention")
            elif kind is ModuleKind.MOE:
                yield from self._experts()
            elif kind is ModuleKind.MLP and not has_experts:
                yield self._own(Conversion.ALL_REDUCE, "MLP")
            elif kind is ModuleKind.LM_HEAD:
                rows = -(-self._num_rows // self._dp) * self._graph.sizes["vocab"] * self._graph.activation_bytes
                yield BaselineCollective(Conversion.ALL_GATHER, "logits", self._tp, 1, rows)

    @property
    def _splits_tokens(self) -> bool:
        """vLLM's sequence-parallel MoE."""
        return self._expert_parallel and self._dp > 1 and self._tp > 1

    def _experts(self) -> Iterator[BaselineCollective]:
        if self._dp == 1:
            yield self._own(Conversion.ALL_REDUCE, "MoE")
            return
        size, stride = (self._world_size, 1) if self._splits_tokens else (self._dp, self._tp)
        yield BaselineCollective(Conversion.ALL_GATHER, "MoE dispatch", size, stride, self._all_bytes)
        yield BaselineCollective(Conversion.REDUCE_SCATTER, "MoE combine", size, stride, self._all_bytes)
        kind = Conversion.ALL_GATHER if self._splits_tokens else Conversion.ALL_REDUCE
        yield self._own(kind, "MoE tokens")

    def _own(self, kind: Conversion, what: str) -> BaselineCollective:
        """A collective of the tensor-parallel group over its own tokens."""
        return BaselineCollective(kind, what, self._tp, 1, self._own_bytes)
