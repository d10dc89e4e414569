# SPDX-License-Identifier: Apache-2.0
"""Random declared models: any module may read any earlier value of its section, and no length divides evenly."""

from __future__ import annotations

from hypothesis import strategies as st

from tokenspeed_plugin.placement import (
    Freedom,
    ModelGraph,
    ModuleKind,
    ModuleSpec,
    Node,
    Param,
    Partial,
    Port,
    Section,
    Shard,
)
from tokenspeed_plugin.placement.graph import STREAM
from tokenspeed_plugin.placement.models import blocks
from tokenspeed_plugin.placement.models.decoder import HIDDEN_PORT, entry, leave

SIZES = {
    "hidden": 12,
    "vocab": 29,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 3,
    "ffn": 13,
    "wide": 11,
    "expert_ffn": 9,
    "experts": 8,
    "all_experts": 8,
}
WIDE = ("tokens", "wide")
KINDS = ("norm", "scale", "add", "add", "mlp", "attention", "experts", "wide")


def wide_modules(name: str) -> tuple[ModuleSpec, ModuleSpec, ModuleSpec]:
    """Column-parallel matrix, a norm over all columns (so: all-to-all or gather), row-parallel matrix."""
    columns = ModuleSpec(
        f"{name}_columns",
        ModuleKind.LINEAR,
        (Port(blocks.HIDDEN, blocks.HEADS_IN),),
        Port(WIDE, {"attn_tp": Shard(1), **blocks.SEQUENCES}),
        (Param("weight", ("wide", "hidden"), {"attn_tp": Shard(0)}),),
    )
    norm = ModuleSpec(
        f"{name}_norm", ModuleKind.NORM, (Port(WIDE),), Port(WIDE), (Param("weight", ("wide",)),), Freedom.TOKENS
    )
    rows = ModuleSpec(
        f"{name}_rows",
        ModuleKind.LINEAR,
        (Port(WIDE, {"dense_tp": Shard(1)}),),
        Port(blocks.HIDDEN, {"dense_tp": Partial()}),
        (Param("weight", ("hidden", "wide"), {"dense_tp": Shard(1)}),),
        Freedom.TOKENS,
    )
    return columns, norm, rows


def single(kind: str, name: str) -> ModuleSpec:
    if kind == "norm":
        return blocks.norm(name)
    if kind == "scale":
        return blocks.scale(name, 0.7)
    if kind == "mlp":
        return blocks.mlp(name, bias=True, output_gate=True)
    if kind == "attention":
        return blocks.attention(name, 2, bias=True, output_bias=True, sinks=True)
    return blocks.experts(name, 8, 3, bias=True, activation="swiglu-oai")


@st.composite
def random_section(draw: st.DrawFn, name: str) -> Section:
    """Up to six random modules; the result adds the last value to the stream, so all of them matter."""
    nodes: list[Node] = [Node(blocks.norm("first"), (STREAM,))]
    values = [STREAM, "first"]
    for index in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(KINDS))
        module = f"{kind}{index}"
        reads = draw(st.sampled_from(values))
        if kind == "add":
            nodes.append(Node(blocks.add(module), (reads, values[-1])))
        elif kind == "wide":
            columns, norm, rows = wide_modules(module)
            nodes += [Node(columns, (reads,)), Node(norm, (columns.name,)), Node(rows, (norm.name,))]
        else:
            nodes.append(Node(single(kind, module), (reads,)))
        values.append(nodes[-1].spec.name)
    nodes.append(Node(blocks.add("out"), (values[-1], values[-2])))
    nodes.append(Node(blocks.add("residual"), (STREAM, "out")))
    return Section(name, tuple(nodes), HIDDEN_PORT, "residual")


@st.composite
def random_model(draw: st.DrawFn) -> ModelGraph:
    """Two layers of one or two kinds between entry and exit."""
    kinds = [draw(random_section(f"layer{i}")) for i in range(draw(st.integers(1, 2)))]
    order = ("entry", *(draw(st.sampled_from(kinds)).name for _ in range(2)), "exit")
    sections = {s.name: s for s in (entry(), *kinds, leave())}
    return ModelGraph("random", sections, order, SIZES, divisible=frozenset())
