# SPDX-License-Identifier: Apache-2.0
"""The devices of one pipeline stage, cut so that every named axis is a product of the same small pieces.

Attention, dense MLP and MoE split the same ranks differently. Each named axis covers a range of strides; all range ends
together cut the stage into *atoms*, outermost first, and an axis is a run of atoms. A tensor has one placement per atom,
so neighbours that use different axes still speak of the same devices::

    world 8, attn=tp2, dense=tp2, moe=ep8        rank = 2 * a0 + a1
    atoms      a0 (size 4)   a1 (size 2)
    dp         [----------]
    attn_tp                  [----------]
    ep         [------------------------]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING

from tokenspeed_plugin.placement.algebra import PlacementError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


@dataclass(frozen=True)
class Extent:
    """The strides that a named axis covers: ranks ``stride`` apart, ``size`` of them."""

    stride: int
    size: int

    @property
    def end(self) -> int:
        """The stride of whatever lies outside this axis."""
        return self.stride * self.size


@dataclass(frozen=True)
class Mesh:
    """Sizes of the atoms (outermost first) and, for each axis, which atoms it is made of."""

    atom_sizes: tuple[int, ...]
    axes: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def from_extents(cls, world_size: int, extents: Mapping[str, Extent]) -> Mesh:
        """Cut ``world_size`` ranks at every end of every extent.

        Raises:
            PlacementError: an extent does not divide the world, or two extents cross.
        """
        cuts = sorted({1, world_size} | {cut for e in extents.values() for cut in (e.stride, e.end)})
        for inner, outer in pairwise(cuts):
            if outer % inner:
                message = (
                    f"world size {world_size}: group sizes {inner} and {outer} do not nest (one must divide the other)"
                )
                raise PlacementError(message)
        bounds = list(pairwise(cuts))[::-1]
        sizes = tuple(outer // inner for inner, outer in bounds)
        axes = tuple(
            (name, tuple(i for i, (inner, outer) in enumerate(bounds) if e.stride <= inner and outer <= e.end))
            for name, e in extents.items()
        )
        return cls(sizes, axes)

    @property
    def world_size(self) -> int:
        """Number of ranks in the stage."""
        return prod(self.atom_sizes)

    @cached_property
    def _atoms_of(self) -> dict[str, tuple[int, ...]]:
        return dict(self.axes)

    def atoms(self, axis: str) -> tuple[int, ...]:
        """Atoms of ``axis``, outermost first; none when its size is one.

        Raises:
            PlacementError: there is no such axis.
        """
        if axis not in self._atoms_of:
            message = f"axis {axis!r} is not one of {', '.join(self._atoms_of)}"
            raise PlacementError(message)
        return self._atoms_of[axis]

    def size(self, atoms: Sequence[int]) -> int:
        """Number of ranks in one group over ``atoms``."""
        return prod(self.atom_sizes[a] for a in atoms)

    def stride(self, atom: int) -> int:
        """Distance in ranks between neighbours along ``atom``."""
        return prod(self.atom_sizes[atom + 1 :])

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Position of ``rank`` along every atom."""
        return tuple(rank // self.stride(a) % size for a, size in enumerate(self.atom_sizes))

    def index(self, rank: int, atoms: Sequence[int]) -> int:
        """Position of ``rank`` inside its group over ``atoms`` (outermost atom most significant)."""
        position = 0
        for atom in atoms:
            position = position * self.atom_sizes[atom] + self.coordinates(rank)[atom]
        return position

    def groups(self, atoms: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Every group of ranks that differ only along ``atoms``, each in the order of :meth:`index`."""
        others = [a for a in range(len(self.atom_sizes)) if a not in atoms]
        inside = [range(self.atom_sizes[a]) for a in atoms]
        for fixed in product(*(range(self.atom_sizes[a]) for a in others)):
            base = sum(c * self.stride(a) for a, c in zip(others, fixed, strict=True))
            yield tuple(
                base + sum(c * self.stride(a) for a, c in zip(atoms, moving, strict=True))
                for moving in product(*inside)
            )

    def label(self, atoms: Sequence[int]) -> str:
        """The shortest name of a set of atoms: axes that make it up, joined by ``*``."""
        wanted = set(atoms)
        exact = [name for name, own in self.axes if own and set(own) == wanted]
        if exact:
            return exact[0]
        names: list[str] = []
        left = set(wanted)
        for name, own in sorted(self.axes, key=lambda item: -len(item[1])):
            if own and set(own) <= left:
                names.append(name)
                left -= set(own)
        return "*".join(names + [f"atom{a}" for a in sorted(left)])
