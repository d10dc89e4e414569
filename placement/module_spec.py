# SPDX-License-Identifier: Apache-2.0
"""What a module declares: the placements of its inputs, output and parameters over named axes. No collective appears here.

Every dimension has a name, and a declaration is checked against the one rule that contractions obey: an axis shards one
named dimension of the parameters, everywhere it occurs; an activation that has that dimension is sharded along it; the
output is Partial when the dimension is summed away.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from itertools import product
from typing import TYPE_CHECKING, NoReturn

from tokenspeed_plugin.placement.algebra import PARTIAL, REPLICATE, TOKENS, Partial, Placement, PlacementError, Shard
from tokenspeed_plugin.placement.layout import Layout, spread

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tokenspeed_plugin.placement.mesh import Mesh


class ModuleKind(str, Enum):
    """What a module computes; the simulator and the fusion pass know these."""

    EMBEDDING = "embedding"
    NORM = "norm"
    ADD = "add"
    SCALE = "scale"
    ATTENTION = "attention"
    MLA = "mla"
    MLP = "mlp"
    MOE = "moe"
    LINEAR = "linear"
    ROWS = "rows"
    LM_HEAD = "lm-head"
    SINK = "sink"


class Freedom(str, Enum):
    """What a module accepts over axes that it does not declare."""

    FIXED = "fixed"
    """Only Replicate."""
    TOKENS = "tokens"
    """Replicate, or any split of the tokens: the module treats every token by itself."""
    LINEAR = "linear"
    """As TOKENS, or Partial(sum) on every input: the module commutes with addition."""

    @property
    def choices(self) -> tuple[Placement, ...]:
        """Placements allowed on an undeclared axis, for all inputs and the output alike."""
        return {
            Freedom.FIXED: (REPLICATE,),
            Freedom.TOKENS: (REPLICATE, TOKENS),
            Freedom.LINEAR: (REPLICATE, TOKENS, PARTIAL),
        }[self]


@dataclass(frozen=True)
class Port:
    """One activation: dimension names and its placement over declared axes.

    ``wire_bytes`` is the size of an element, scales included, when the only thing that the consumer does with it is to
    quantise it (None: the activation type); a gather into such a port may move the quantised tensor.
    """

    dims: tuple[str, ...]
    placements: Mapping[str, Placement] = field(default_factory=dict)
    wire_bytes: float | None = None


@dataclass(frozen=True)
class Param:
    """One parameter. ``follows`` maps its dimension to ``(other, ratio)`` when part ``[a, b)`` of ``other`` needs
    ``[a // ratio, ceil(b / ratio))`` of it (key-value heads under query heads). An ``additive`` parameter is added after
    the contraction, so a Partial output needs it Partial: the first rank adds it, once.
    """

    name: str
    dims: tuple[str, ...]
    placements: Mapping[str, Placement] = field(default_factory=dict)
    follows: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    additive: bool = False

    def sharded_dim(self, axis: str) -> str | None:
        """Name of the dimension that ``axis`` shards (of the followed one, when it follows another)."""
        placement = self.placements.get(axis, REPLICATE)
        if not isinstance(placement, Shard):
            return None
        name = self.dims[placement.dim]
        return self.follows[name][0] if name in self.follows else name


@dataclass(frozen=True)
class Signature:
    """One way to run a module: the layout of every input and of the output, over the atoms of a mesh."""

    inputs: tuple[Layout, ...]
    output: Layout


@dataclass(frozen=True)
class ModuleSpec:
    """One declared module with its boundary placements."""

    name: str
    kind: ModuleKind
    inputs: tuple[Port, ...]
    output: Port
    params: tuple[Param, ...] = ()
    freedom: Freedom = Freedom.FIXED
    options: Mapping[str, object] = field(default_factory=dict)
    active_fraction: float = 1.0
    """Share of the parameters that one token uses (experts)."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes that any port or parameter mentions, in order of mention."""
        mentions = [p.placements for p in (*self.inputs, self.output)] + [p.placements for p in self.params]
        return tuple(dict.fromkeys(axis for placements in mentions for axis in placements))

    def signatures(self, mesh: Mesh) -> Iterator[Signature]:
        """Every signature that the declaration allows on ``mesh``."""
        declared = {atom for axis in self.axes for atom in mesh.atoms(axis)}
        free = [a for a in range(len(mesh.atom_sizes)) if a not in declared]
        inputs = [self._layout(mesh, port) for port in self.inputs]
        output = self._layout(mesh, self.output)
        for choice in product(self.freedom.choices, repeat=len(free)):
            chosen = dict(zip(free, choice, strict=True))
            yield Signature(tuple(_overlay(layout, chosen) for layout in inputs), _overlay(output, chosen))

    def _layout(self, mesh: Mesh, port: Port) -> Layout:
        try:
            return spread(mesh, port.placements)
        except PlacementError as error:
            message = f"module {self.name!r}: {error}"
            raise PlacementError(message) from error

    def check(self) -> None:
        """Prove the declared boundary from the parameter placements.

        Raises:
            PlacementError: names the module, the parameter or port, the axis, what was declared and what follows.
        """
        for axis in self.axes:
            if self.params and self.freedom is not Freedom.LINEAR:
                self._check_axis(axis)

    def _check_axis(self, axis: str) -> None:
        dims = {p.sharded_dim(axis) for p in self.params} - {None}
        if len(dims) > 1:
            self._fail(axis, f"its parameters shard different dimensions: {', '.join(sorted(map(str, dims)))}")
        if not dims:
            self._check_unsharded(axis)
            return
        dim = str(next(iter(dims)))
        contracted = dim not in self.output.dims
        for param in self.params:
            self._check_param(axis, param, dim, contracted)
        for index, port in enumerate(self.inputs):
            self._expect(axis, f"input {index}", port, self._by_dim(port, dim))
        self._expect(axis, "output", self.output, PARTIAL if contracted else self._by_dim(self.output, dim))

    def _check_param(self, axis: str, param: Param, dim: str, contracted: bool) -> None:
        declared = param.placements.get(axis, REPLICATE)
        owned = [i for i, name in enumerate(param.dims) if name == dim or param.follows.get(name, ("", 0))[0] == dim]
        wanted: Placement = REPLICATE
        if owned:
            wanted = Shard(owned[0])
        elif param.additive and contracted:
            wanted = PARTIAL
        if declared != wanted:
            self._fail(axis, f"parameter {param.name!r} {param.dims} is declared {declared}, {dim!r} needs {wanted}")

    def _check_unsharded(self, axis: str) -> None:
        placements = {port.placements.get(axis, REPLICATE) for port in (*self.inputs, self.output)}
        if any(isinstance(p.placements.get(axis), Partial) for p in self.params):
            self._fail(axis, "a parameter is Partial but none is sharded")
        if placements not in ({REPLICATE}, {TOKENS}):
            shown = ", ".join(sorted(map(str, placements)))
            self._fail(axis, f"no parameter is sharded, so inputs and output are all R or all S0, not {shown}")

    def _by_dim(self, port: Port, dim: str) -> Placement:
        return Shard(port.dims.index(dim)) if dim in port.dims else REPLICATE

    def _expect(self, axis: str, what: str, port: Port, wanted: Placement) -> None:
        declared = port.placements.get(axis, REPLICATE)
        if declared != wanted:
            self._fail(axis, f"{what} {port.dims} is declared {declared} but the parameters imply {wanted}")

    def _fail(self, axis: str, reason: str) -> NoReturn:
        message = f"module {self.name!r}, axis {axis!r}: {reason}"
        raise PlacementError(message)


def _overlay(layout: Layout, chosen: Mapping[int, Placement]) -> Layout:
    return tuple(chosen.get(atom, placement) for atom, placement in enumerate(layout))
