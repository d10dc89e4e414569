# SPDX-License-Identifier: Apache-2.0
"""Layouts: one placement per atom of the mesh, and which part of a dimension a rank then holds.

Shards nest: the outermost sharded atom cuts the dimension first, the next one cuts each part again. Parts are cut at
multiples of ``ceil(length / n)``, so only trailing parts are short and padding to equal parts appends at the end of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from tokenspeed_plugin.placement.algebra import (
    REPLICATE,
    IllegalConversionError,
    Partial,
    Placement,
    PlacementError,
    Shard,
    conversion,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tokenspeed_plugin.placement.mesh import Mesh

Layout: TypeAlias = tuple[Placement, ...]
Interval: TypeAlias = tuple[int, int]


def text(layout: Layout) -> str:
    """Short form, outermost atom first: ``S0.P`` is token-sharded outside, partial inside."""
    return ".".join(str(p) for p in layout) or "local"


def spread(mesh: Mesh, placements: Mapping[str, Placement], otherwise: Placement = REPLICATE) -> Layout:
    """The layout that gives each axis its placement and every other atom ``otherwise``.

    Raises:
        PlacementError: two axes that share devices are given different placements.
    """
    layout: list[Placement | None] = [None] * len(mesh.atom_sizes)
    for axis, placement in placements.items():
        for atom in mesh.atoms(axis):
            if layout[atom] not in (None, placement):
                message = f"axis {axis!r} asks for {placement} on devices that another axis declares {layout[atom]}"
                raise PlacementError(message)
            layout[atom] = placement
    return tuple(otherwise if p is None else p for p in layout)


def sharded_atoms(layout: Layout, dim: int) -> tuple[int, ...]:
    """Atoms that shard ``dim``, in nesting order."""
    return tuple(a for a, p in enumerate(layout) if p == Shard(dim))


def partial_atoms(layout: Layout) -> tuple[int, ...]:
    """Atoms along which the tensor still has to be reduced."""
    return tuple(a for a, p in enumerate(layout) if isinstance(p, Partial))


def dims_sharded(*layouts: Layout) -> tuple[int, ...]:
    """Dimensions that any of the layouts shards."""
    return tuple(sorted({p.dim for layout in layouts for p in layout if isinstance(p, Shard)}))


def part(interval: Interval, num_parts: int, index: int) -> Interval:
    """The ``index``-th of ``num_parts`` parts of ``interval``."""
    low, high = interval
    step = -(-(high - low) // num_parts)
    return min(low + step * index, high), min(low + step * (index + 1), high)


def interval(mesh: Mesh, atoms: Sequence[int], length: int, rank: int) -> Interval:
    """What ``rank`` holds of a dimension of ``length`` that ``atoms`` shard in nesting order."""
    held = (0, length)
    coordinates = mesh.coordinates(rank)
    for atom in atoms:
        held = part(held, mesh.atom_sizes[atom], coordinates[atom])
    return held


def local_length(mesh: Mesh, atoms: Sequence[int], length: int) -> int:
    """Length of the longest part (what padded, equal parts have)."""
    for atom in atoms:
        length = -(-length // mesh.atom_sizes[atom])
    return length


def check_convertible(mesh: Mesh, source: Layout, target: Layout, producer: str, consumer: str) -> None:
    """Refuse a conversion that no sequence of collectives can make.

    Raises:
        IllegalConversionError: names both modules, the axis and what to declare instead.
    """
    for atom, (before, after) in enumerate(zip(source, target, strict=True)):
        try:
            conversion(before, after)
        except IllegalConversionError as error:
            message = (
                f"{producer} produces {before} over axis {mesh.label((atom,))!r} but {consumer} takes {after}: {error}"
            )
            raise IllegalConversionError(message) from error
