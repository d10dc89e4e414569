# SPDX-License-Identifier: Apache-2.0
"""From one layout to another: the shortest sequence of primitive operations, cheap ones first.

Order matters for bytes. Slices and reduce-scatters come first because they shrink the tensor, all-reduces work on what is
left, all-gathers come last. Atoms that need the same operation share one collective over their joint group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tokenspeed_plugin.placement.algebra import (
    REPLICATE,
    Conversion,
    Partial,
    Placement,
    Replicate,
    Shard,
)
from tokenspeed_plugin.placement.layout import Layout, dims_sharded, partial_atoms, sharded_atoms

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Primitive:
    """One operation over the joint group of ``atoms``.

    ``dim`` is what a slice, reduce-scatter or all-to-all shards, or what an all-gather joins; ``from_dim`` is the dimension
    that an all-to-all joins; ``op`` is the reduction.
    """

    kind: Conversion
    atoms: tuple[int, ...]
    dim: int | None = None
    from_dim: int | None = None
    op: str | None = None
    before: Layout = ()
    after: Layout = ()


def primitives(source: Layout, target: Layout) -> tuple[Primitive, ...]:
    """Operations that turn ``source`` into ``target``; empty when they are equal. Both must be convertible."""
    path = _Path(source)
    exchanged = _exchange(path, target)
    for dim in dims_sharded(source, target):
        stale, fresh = _differences(path.layout, target, dim)
        if stale and (fresh or _blocks_other(stale, target)) and dim not in exchanged:
            path.gather(stale, dim)
    for dim in dims_sharded(target):
        _shard_runs(path, target, dim)
    path.reduce(target)
    path.keep_first(target)
    for dim in dims_sharded(source):
        stale, _ = _differences(path.layout, target, dim)
        if stale:
            path.gather(stale, dim)
    return tuple(path.steps)


class _Path:
    """The layout reached so far and the operations that led there."""

    def __init__(self, source: Layout) -> None:
        self.layout = source
        self.steps: list[Primitive] = []

    def apply(self, primitive: Primitive, placement: Placement) -> None:
        after = tuple(placement if a in primitive.atoms else p for a, p in enumerate(self.layout))
        self.steps.append(replace(primitive, before=self.layout, after=after))
        self.layout = after

    def gather(self, atoms: tuple[int, ...], dim: int) -> None:
        self.apply(Primitive(Conversion.ALL_GATHER, atoms, dim=dim), REPLICATE)

    def shard(self, atoms: tuple[int, ...], dim: int) -> None:
        first = self.layout[atoms[0]]
        if isinstance(first, Partial):
            self.apply(Primitive(Conversion.REDUCE_SCATTER, atoms, dim=dim, op=first.op), Shard(dim))
        else:
            self.apply(Primitive(Conversion.SLICE, atoms, dim=dim), Shard(dim))

    def reduce(self, target: Layout) -> None:
        waiting = [a for a in partial_atoms(self.layout) if isinstance(target[a], Replicate)]
        for op in sorted({self._op(a) for a in waiting}):
            atoms = tuple(a for a in waiting if self._op(a) == op)
            self.apply(Primitive(Conversion.ALL_REDUCE, atoms, op=op), REPLICATE)

    def keep_first(self, target: Layout) -> None:
        wanted = [a for a in partial_atoms(target) if isinstance(self.layout[a], Replicate)]
        for placement in sorted({target[a] for a in wanted}, key=str):
            atoms = tuple(a for a in wanted if target[a] == placement)
            op = placement.op if isinstance(placement, Partial) else None
            self.apply(Primitive(Conversion.KEEP_FIRST, atoms, op=op), placement)

    def _op(self, atom: int) -> str:
        placement = self.layout[atom]
        return placement.op if isinstance(placement, Partial) else ""


def _differences(layout: Layout, target: Layout, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Atoms to gather and atoms to shard along ``dim``: what follows the common nesting prefix."""
    held, wanted = sharded_atoms(layout, dim), sharded_atoms(target, dim)
    common = 0
    while common < min(len(held), len(wanted)) and held[common] == wanted[common]:
        common += 1
    return held[common:], wanted[common:]


def _blocks_other(stale: Sequence[int], target: Layout) -> bool:
    """Whether an atom to be gathered has to shard another dimension afterwards."""
    return any(isinstance(target[a], Shard) for a in stale)


def _exchange(path: _Path, target: Layout) -> frozenset[int]:
    """All-to-all where exactly the same atoms leave one dimension and enter another; returns the dimensions done."""
    done: set[int] = set()
    dims = dims_sharded(path.layout, target)
    for from_dim in dims:
        for dim in dims:
            stale, fresh_here = _differences(path.layout, target, from_dim)
            stale_there, fresh = _differences(path.layout, target, dim)
            if from_dim != dim and stale and stale == fresh and not fresh_here and not stale_there:
                path.apply(Primitive(Conversion.ALL_TO_ALL, stale, dim=dim, from_dim=from_dim), Shard(dim))
                done |= {from_dim, dim}
    return frozenset(done)


def _shard_runs(path: _Path, target: Layout, dim: int) -> None:
    """Shard ``dim`` outermost atom first, one operation for each run of atoms in the same state."""
    _, fresh = _differences(path.layout, target, dim)
    run: list[int] = []
    for atom in fresh:
        if run and path.layout[atom] != path.layout[run[0]]:
            path.shard(tuple(run), dim)
            run = []
        run.append(atom)
    if run:
        path.shard(tuple(run), dim)
