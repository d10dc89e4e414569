# SPDX-License-Identifier: Apache-2.0
"""A declared model: modules wired into sections (entry, one per layer kind, exit) and the order of the sections.

Exactly one value, the residual stream, crosses from a section to the next. Every other value is local to its section.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tokenspeed_plugin.placement.algebra import PlacementError
from tokenspeed_plugin.placement.module_spec import ModuleSpec, Port

if TYPE_CHECKING:
    from collections.abc import Mapping

STREAM: Final = "stream"
"""Name, inside a section, of the value that came from the section before."""


@dataclass(frozen=True)
class Node:
    """A module and the values it reads; the value it writes carries the module's name."""

    spec: ModuleSpec
    reads: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.reads) != len(self.spec.inputs):
            message = (
                f"module {self.spec.name!r} declares {len(self.spec.inputs)} inputs but reads {len(self.reads)} values"
            )
            raise PlacementError(message)


@dataclass(frozen=True)
class Section:
    """Modules in execution order. ``stream`` describes the incoming value, ``result`` names the outgoing one."""

    name: str
    nodes: tuple[Node, ...]
    stream: Port
    result: str

    def __post_init__(self) -> None:
        known = {STREAM}
        for node in self.nodes:
            missing = [read for read in node.reads if read not in known]
            if missing or node.spec.name in known:
                reason = f"reads {missing[0]!r} before it exists" if missing else "is declared twice"
                message = f"section {self.name!r}: module {node.spec.name!r} {reason}"
                raise PlacementError(message)
            known.add(node.spec.name)
        if self.result not in known:
            message = f"section {self.name!r}: result {self.result!r} is not one of {', '.join(sorted(known))}"
            raise PlacementError(message)

    def port(self, value: str) -> Port:
        """Dimensions of a value of this section."""
        return self.stream if value == STREAM else self.node(value).spec.output

    def node(self, name: str) -> Node:
        """The node of module ``name``."""
        return next(n for n in self.nodes if n.spec.name == name)

    def last_use(self) -> dict[str, int]:
        """For every value the index of its last reader; the result lives to the end."""
        uses = {read: index for index, node in enumerate(self.nodes) for read in node.reads}
        uses[self.result] = len(self.nodes)
        return uses


@dataclass(frozen=True)
class ModelGraph:
    """A declared model.

    ``order`` lists section names from first to last. ``sizes`` gives the length of every dimension except ``tokens`` and
    ``rows``, which belong to a step. ``divisible`` names dimensions that only even shards can split (attention heads).
    """

    name: str
    sections: Mapping[str, Section]
    order: tuple[str, ...]
    sizes: Mapping[str, int]
    activation_bytes: int = 2
    weight_bytes: float = 2.0
    divisible: frozenset[str] = frozenset({"heads", "ffn", "expert_ffn", "shared_ffn"})
    family: str = "custom"

    def __post_init__(self) -> None:
        unknown = [name for name in self.order if name not in self.sections]
        if unknown:
            message = f"model {self.name!r}: section {unknown[0]!r} is not one of {', '.join(self.sections)}"
            raise PlacementError(message)
        for section in self.sections.values():
            for node in section.nodes:
                node.spec.check()

    @property
    def layer_counts(self) -> Counter[str]:
        """How often each section runs in one forward pass."""
        return Counter(self.order)

    def length(self, dim: str, num_tokens: int, num_rows: int) -> int:
        """Length of dimension ``dim`` in a step of ``num_tokens`` tokens of which ``num_rows`` get logits."""
        if dim == "tokens":
            return num_tokens
        return num_rows if dim == "rows" else self.sizes[dim]

    def modules(self) -> tuple[ModuleSpec, ...]:
        """Every distinct declared module."""
        return tuple(node.spec for section in self.sections.values() for node in section.nodes)

    @property
    def axes(self) -> frozenset[str]:
        """Axes that the modules mention, and the two that every step has."""
        return frozenset({"attn_tp", "dp"}).union(*(module.axes for module in self.modules()))
