# SPDX-License-Identifier: Apache-2.0
"""Wiring shared by decoder models: entry, pre-norm layers, exit, and the transformations of whole graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tokenspeed_plugin.placement.algebra import PlacementError
from tokenspeed_plugin.placement.graph import STREAM, ModelGraph, Node, Section
from tokenspeed_plugin.placement.models import blocks
from tokenspeed_plugin.placement.module_spec import Port

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tokenspeed_plugin.placement.module_spec import ModuleSpec

HIDDEN_PORT = Port(blocks.HIDDEN)
SEND = "pipeline_send"


def entry(*, embedding_scale: float | None = None) -> Section:
    """Token ids to the residual stream."""
    nodes = [Node(blocks.embedding(), (STREAM,))]
    if embedding_scale is not None:
        nodes.append(Node(blocks.scale("embed_scale", embedding_scale), ("embed_tokens",)))
    return Section("entry", tuple(nodes), Port(("tokens",)), nodes[-1].spec.name)


def pre_norm_layer(name: str, attention: ModuleSpec, *feed_forward: ModuleSpec) -> Section:
    """``x + attention(norm(x))``, then the same for the sum of one or two feed-forward modules."""
    nodes = [
        Node(blocks.norm("input_layernorm"), (STREAM,)),
        Node(attention, ("input_layernorm",)),
        Node(blocks.add("attention_residual"), (STREAM, attention.name)),
        Node(blocks.norm("post_attention_layernorm"), ("attention_residual",)),
        *(Node(module, ("post_attention_layernorm",)) for module in feed_forward),
    ]
    branch = feed_forward[0].name
    for other in feed_forward[1:]:
        nodes.append(Node(blocks.add(f"{branch}_plus_{other.name}"), (branch, other.name)))
        branch = nodes[-1].spec.name
    nodes.append(Node(blocks.add("mlp_residual"), ("attention_residual", branch)))
    return Section(name, tuple(nodes), HIDDEN_PORT, "mlp_residual")


def sandwich_layer(name: str, attention: ModuleSpec, mlp: ModuleSpec) -> Section:
    """Norms before and after both halves (Gemma 2 and 3)."""
    nodes = (
        Node(blocks.norm("input_layernorm", unit_offset=True), (STREAM,)),
        Node(attention, ("input_layernorm",)),
        Node(blocks.norm("post_attention_layernorm", unit_offset=True), (attention.name,)),
        Node(blocks.add("attention_residual"), (STREAM, "post_attention_layernorm")),
        Node(blocks.norm("pre_feedforward_layernorm", unit_offset=True), ("attention_residual",)),
        Node(mlp, ("pre_feedforward_layernorm",)),
        Node(blocks.norm("post_feedforward_layernorm", unit_offset=True), (mlp.name,)),
        Node(blocks.add("mlp_residual"), ("attention_residual", "post_feedforward_layernorm")),
    )
    return Section(name, nodes, HIDDEN_PORT, "mlp_residual")


def parallel_layer(name: str, attention: ModuleSpec, mlp: ModuleSpec) -> Section:
    """``x + attention(norm(x)) + mlp(norm(x))``: one reduction serves both."""
    nodes = (
        Node(blocks.norm("input_layernorm"), (STREAM,)),
        Node(attention, ("input_layernorm",)),
        Node(mlp, ("input_layernorm",)),
        Node(blocks.add("branches"), (attention.name, mlp.name)),
        Node(blocks.add("residual"), (STREAM, "branches")),
    )
    return Section(name, nodes, HIDDEN_PORT, "residual")


def leave(*, unit_offset: bool = False) -> Section:
    """Residual stream to whole logits on every rank of the attention group."""
    nodes = (
        Node(blocks.norm("norm", unit_offset=unit_offset), (STREAM,)),
        Node(blocks.rows(), ("norm",)),
        Node(blocks.lm_head(), ("rows",)),
        Node(blocks.sink("logits", ("rows", "vocab")), ("lm_head",)),
    )
    return Section("exit", nodes, HIDDEN_PORT, "logits")


def with_pipeline(graph: ModelGraph, num_stages: int) -> ModelGraph:
    """Cut the layers into ``num_stages`` stages; the stream is whole where it is sent.

    Raises:
        PlacementError: more stages than layers.
    """
    layers = graph.order[1:-1]
    if not 1 <= num_stages <= len(layers):
        message = f"pp={num_stages}: {graph.name!r} has {len(layers)} layers, so 1 to {len(layers)} stages"
        raise PlacementError(message)
    if num_stages == 1:
        return graph
    send = Section(SEND, (Node(blocks.sink(SEND), (STREAM,)),), HIDDEN_PORT, SEND)
    base, longer = divmod(len(layers), num_stages)
    order: list[str] = [graph.order[0]]
    position = 0
    for stage in range(num_stages):
        length = base + (stage >= num_stages - longer)
        order += layers[position : position + length]
        position += length
        if stage + 1 < num_stages:
            order.append(SEND)
    order.append(graph.order[-1])
    return replace(graph, sections={**graph.sections, SEND: send}, order=tuple(order))


def with_draft_outputs(graph: ModelGraph, layers: Iterable[int]) -> ModelGraph:
    """Also hand out the stream, whole, after each of ``layers`` (hidden states for a draft model).

    Raises:
        PlacementError: a layer number outside the model.
    """
    order, sections = list(graph.order), dict(graph.sections)
    positions = [i for i, name in enumerate(order) if name not in (order[0], order[-1], SEND)]
    for layer in layers:
        if not 0 <= layer < len(positions):
            message = f"draft output after layer {layer}: {graph.name!r} has layers 0 to {len(positions) - 1}"
            raise PlacementError(message)
        own = sections[order[positions[layer]]]
        name = f"{own.name}+draft" if not own.name.endswith("+draft") else own.name
        tap = Node(blocks.sink("draft_hidden_states"), (own.result,))
        nodes = own.nodes if own.name == name else (*own.nodes, tap)
        sections[name] = replace(own, name=name, nodes=nodes)
        order[positions[layer]] = name
    return replace(graph, sections=sections, order=tuple(order))
