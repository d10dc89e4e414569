# SPDX-License-Identifier: Apache-2.0
"""How one tensor lies over one axis of devices, and what it takes to change that.

A tensor is, over one axis of ``n`` devices, *replicated* (each holds all of it), *sharded* along a dimension (each holds
one contiguous part) or *partial* (each holds a summand; the tensor is their reduction). The conversion table is the one
of ``docs/placement.md``; the published description of TokenSpeed also lists a reduce-scatter "from shard to partial",
which the algebra does not have: a reduce-scatter turns Partial into Shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

REDUCTIONS: Final = ("sum", "max")


class PlacementError(ValueError):
    """A declaration, specification or plan that cannot be right; the message names the culprit and what is allowed."""


class IllegalConversionError(PlacementError):
    """No collective turns one placement into the other without inventing data."""


@dataclass(frozen=True)
class Replicate:
    """Every device of the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Shard:
    """Device ``i`` of the axis holds the ``i``-th contiguous part along dimension ``dim`` (parts may differ in size)."""

    dim: int

    def __post_init__(self) -> None:
        if self.dim < 0:
            message = f"Shard(dim={self.dim}): a dimension is counted from the front and is 0 or more"
            raise PlacementError(message)

    def __str__(self) -> str:
        return f"S{self.dim}"


@dataclass(frozen=True)
class Partial:
    """Every device of the axis holds an operand of a reduction ``op``; the tensor is the result."""

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in REDUCTIONS:
            message = f"Partial(op={self.op!r}): allowed reductions are {', '.join(REDUCTIONS)}"
            raise PlacementError(message)

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P{self.op}"


Placement: TypeAlias = Replicate | Shard | Partial

REPLICATE: Final = Replicate()
TOKENS: Final = Shard(0)
PARTIAL: Final = Partial("sum")


class Conversion(str, Enum):
    """The operations that change a placement. The first three touch only local memory."""

    NONE = "none"
    SLICE = "slice"
    KEEP_FIRST = "keep-first"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"

    @property
    def is_collective(self) -> bool:
        """Whether devices exchange data."""
        return self in COLLECTIVES


COLLECTIVES: Final = frozenset(
    {Conversion.ALL_GATHER, Conversion.ALL_TO_ALL, Conversion.ALL_REDUCE, Conversion.REDUCE_SCATTER}
)


def conversion(source: Placement, target: Placement) -> Conversion:
    """The entry of the conversion table for one axis.

    Raises:
        IllegalConversionError: Shard to Partial, or Partial to a Partial of another reduction.
    """
    if source == target:
        return Conversion.NONE
    if isinstance(source, Replicate):
        return Conversion.SLICE if isinstance(target, Shard) else Conversion.KEEP_FIRST
    if isinstance(source, Shard):
        return _from_shard(source, target)
    if isinstance(target, Replicate):
        return Conversion.ALL_REDUCE
    if isinstance(target, Shard):
        return Conversion.REDUCE_SCATTER
    message = f"a {source.op} of parts is not a {target.op} of parts: reduce it first"
    raise IllegalConversionError(message)


def _from_shard(source: Shard, target: Placement) -> Conversion:
    if isinstance(target, Replicate):
        return Conversion.ALL_GATHER
    if isinstance(target, Shard):
        return Conversion.ALL_TO_ALL
    message = (
        f"{source} to {target}: a part of a tensor is not an operand of its reduction; declare Replicate between them"
    )
    raise IllegalConversionError(message)
