# SPDX-License-Identifier: Apache-2.0
"""The part of a declared model that a plan executes on vLLM's layers, in the pieces in which vLLM has them.

vLLM selects rows and computes logits itself, so the graph ends with the final norm, whole on every rank. Where one layer of
vLLM computes several declared modules (routed and shared experts), they become one module with the same boundary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tokenspeed_plugin.placement.algebra import PlacementError
from tokenspeed_plugin.placement.graph import STREAM, ModelGraph, Node, Section
from tokenspeed_plugin.placement.models import blocks
from tokenspeed_plugin.placement.models.decoder import HIDDEN_PORT, SEND
from tokenspeed_plugin.placement.module_spec import ModuleKind, ModuleSpec, Port

if TYPE_CHECKING:
    from collections.abc import Sequence

HIDDEN_STATES = "hidden_states"


def runtime_graph(graph: ModelGraph, together: Sequence[str] = ()) -> ModelGraph:
    """``graph`` without what follows its hidden states, with the modules ``together`` as one (the first one's name).

    Raises:
        PlacementError: the last section selects no rows, or ``together`` is not a group of summed modules.
    """
    sections = {name: _merged(section, together) for name, section in graph.sections.items()}
    sections[graph.order[-1]] = _until_rows(sections[graph.order[-1]])
    return replace(graph, sections=sections)


def stage_graph(graph: ModelGraph, first_layer: int, end_layer: int) -> ModelGraph:
    """Layers ``[first_layer, end_layer)`` of a runtime graph: the part of one pipeline stage.

    A stage begins with the embedding or with the stream that was sent to it, and ends with the final norm or with a stream
    that is whole on every rank, to be sent on.
    """
    layers = graph.order[1:-1]
    start = graph.order[:1] if first_layer == 0 else ()
    end = graph.order[-1:] if end_layer == len(layers) else (SEND,)
    order = (*start, *layers[first_layer:end_layer], *end)
    send = Section(SEND, (Node(blocks.sink(SEND), (STREAM,)),), HIDDEN_PORT, SEND)
    return replace(graph, sections={**graph.sections, SEND: send}, order=order)


def _until_rows(section: Section) -> Section:
    position = next((i for i, n in enumerate(section.nodes) if n.spec.kind is ModuleKind.ROWS), None)
    if position is None:
        message = f"section {section.name!r}: no module of kind 'rows', so it is not known where hidden states end"
        raise PlacementError(message)
    kept = (*section.nodes[:position], Node(blocks.sink(HIDDEN_STATES), section.nodes[position].reads))
    return Section(section.name, kept, section.stream, HIDDEN_STATES)


def _merged(section: Section, together: Sequence[str]) -> Section:
    """The modules ``together`` read one value and are added up; the sum keeps its readers under the first one's name."""
    inside = [n for n in section.nodes if n.spec.name in together]
    parts = [n for n in inside if n.spec.kind is not ModuleKind.ADD]
    if len(parts) < 2:
        return section
    total = inside[-1].spec.name
    if len({n.reads for n in parts}) != 1 or inside[-1].spec.kind is not ModuleKind.ADD:
        message = f"section {section.name!r}: {', '.join(together)} do not read one value and add up"
        raise PlacementError(message)
    whole = Node(_joint([n.spec for n in parts]), parts[0].reads)
    nodes: list[Node] = []
    for node in section.nodes:
        if node is inside[-1]:
            nodes.append(whole)
        elif node not in inside:
            reads = tuple(whole.spec.name if read == total else read for read in node.reads)
            nodes.append(Node(node.spec, reads))
    return Section(section.name, tuple(nodes), section.stream, section.result)


def _joint(specs: Sequence[ModuleSpec]) -> ModuleSpec:
    """One module whose parameters are those of all, and whose output is Partial wherever one of theirs is."""
    first = specs[0]
    params = tuple(replace(p, name=f"{s.name}.{p.name}") for s in specs for p in s.params)
    entry = {axis: placement for s in specs for axis, placement in s.inputs[0].placements.items()}
    leave = {axis: placement for s in specs for axis, placement in s.output.placements.items()}
    return replace(
        first,
        inputs=(Port(first.inputs[0].dims, entry, first.inputs[0].wire_bytes),),
        output=Port(first.output.dims, leave),
        params=params,
    )
