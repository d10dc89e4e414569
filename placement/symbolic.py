# SPDX-License-Identifier: Apache-2.0
"""Tensors without numbers: what part of a value a rank holds, and which contributions are summed in it how often.

A module whose output is Partial contributes one term per participant; the value is the sum of all of them, each once.
Collectives act on these terms as they act on numbers, so a reduction that is missing, repeated or made over the wrong
devices leaves wrong counts. Nothing here is shared with the code that chooses conversions.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from tokenspeed_plugin.placement.algebra import Conversion, PlacementError
from tokenspeed_plugin.placement.layout import Interval, part

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tokenspeed_plugin.placement.mesh import Mesh
    from tokenspeed_plugin.placement.plan import Move

Site: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, order=True)
class Term:
    """The contribution of one participant (``site``: its coordinates) to a value, and how contributions combine."""

    symbol: str
    site: Site = ()
    op: str = "sum"


class SymbolicError(PlacementError):
    """A step that no run-time could execute, or whose result is not one tensor."""


@dataclass(frozen=True)
class SymbolicTensor:
    """``region`` is the part held, per dimension; ``terms`` how often each contribution is in it."""

    region: tuple[Interval, ...]
    terms: tuple[tuple[Term, int], ...]

    @classmethod
    def of(cls, region: Sequence[Interval], terms: Counter[Term]) -> SymbolicTensor:
        """Canonical form: sorted, without zero counts."""
        return cls(tuple(region), tuple(sorted((t, n) for t, n in terms.items() if n)))

    @property
    def counts(self) -> Counter[Term]:
        """Terms as a counter."""
        return Counter(dict(self.terms))

    def cut(self, dim: int, mesh: Mesh, atoms: Sequence[int], rank: int) -> SymbolicTensor:
        """The part of ``rank`` when ``atoms`` split dimension ``dim``."""
        held = self.region[dim]
        for atom in atoms:
            held = part(held, mesh.atom_sizes[atom], mesh.coordinates(rank)[atom])
        return replace(self, region=(*self.region[:dim], held, *self.region[dim + 1 :]))


Ranks: TypeAlias = tuple[SymbolicTensor, ...]


def combine(tensors: Sequence[SymbolicTensor], op: str) -> Counter[Term]:
    """Terms of the reduction of ``tensors``: counts add up in a sum and saturate in a maximum."""
    total: Counter[Term] = Counter()
    for tensor in tensors:
        for term, count in tensor.terms:
            if term.op != op and (len(tensors) > 1 and term.site):
                message = f"a {op} reduces {term.symbol!r}, whose parts combine by {term.op}"
                raise SymbolicError(message)
            total[term] = total[term] + count if op == "sum" else max(total[term], count)
    return total


def apply_move(mesh: Mesh, move: Move, source: Ranks) -> Ranks:
    """The value after one conversion step.

    Raises:
        SymbolicError: the step names a dimension that does not exist or joins parts that do not fit.
    """
    for dim in (move.dim, move.from_dim):
        if dim is not None and dim >= len(source[0].region):
            message = f"{move.kind.value} along dimension {dim} of a value that has {len(source[0].region)}"
            raise SymbolicError(message)
    if list(move.atoms) != sorted(set(move.atoms)):
        message = f"{move.kind.value} over devices in an order that is not outermost first: {move.atoms}"
        raise SymbolicError(message)
    result = list(source)
    for group in mesh.groups(move.atoms):
        members = [source[rank] for rank in group]
        for rank, tensor in zip(group, _OPERATIONS[move.kind](mesh, move, members, group), strict=True):
            result[rank] = tensor
    return tuple(result)


def _slice(mesh: Mesh, move: Move, members: list[SymbolicTensor], group: Sequence[int]) -> list[SymbolicTensor]:
    return [t.cut(_dim(move), mesh, move.atoms, rank) for t, rank in zip(members, group, strict=True)]


def _keep_first(_mesh: Mesh, _move: Move, members: list[SymbolicTensor], _group: Sequence[int]) -> list[SymbolicTensor]:
    return [members[0], *(replace(t, terms=()) for t in members[1:])]


def _all_reduce(_mesh: Mesh, move: Move, members: list[SymbolicTensor], _group: Sequence[int]) -> list[SymbolicTensor]:
    if len({t.region for t in members}) > 1:
        message = f"{move.kind.value} of {move.value!r} adds different parts: {_regions(members)}"
        raise SymbolicError(message)
    reduced = SymbolicTensor.of(members[0].region, combine(members, move.op or "sum"))
    return [reduced] * len(members)


def _reduce_scatter(
    mesh: Mesh, move: Move, members: list[SymbolicTensor], group: Sequence[int]
) -> list[SymbolicTensor]:
    return _slice(mesh, move, _all_reduce(mesh, move, members, group), group)


def _all_gather(_mesh: Mesh, move: Move, members: list[SymbolicTensor], _group: Sequence[int]) -> list[SymbolicTensor]:
    return [_joined(move, members, _dim(move))] * len(members)


def _all_to_all(mesh: Mesh, move: Move, members: list[SymbolicTensor], group: Sequence[int]) -> list[SymbolicTensor]:
    whole = _joined(move, members, move.from_dim or 0)
    return [whole.cut(_dim(move), mesh, move.atoms, rank) for rank in group]


def _joined(move: Move, members: list[SymbolicTensor], dim: int) -> SymbolicTensor:
    first = members[0]
    low, high = first.region[dim]
    for previous, tensor in itertools.pairwise(members):
        elsewhere = [i for i in range(len(first.region)) if i != dim and tensor.region[i] != first.region[i]]
        if tensor.terms != first.terms or elsewhere or tensor.region[dim][0] != previous.region[dim][1]:
            message = f"{move.kind.value} of {move.value!r} along dimension {dim} joins what does not fit: {_regions(members)}"
            raise SymbolicError(message)
        high = tensor.region[dim][1]
    return replace(first, region=(*first.region[:dim], (low, high), *first.region[dim + 1 :]))


def _dim(move: Move) -> int:
    if move.dim is None:
        message = f"{move.kind.value} of {move.value!r} names no dimension"
        raise SymbolicError(message)
    return move.dim


def _regions(members: Sequence[SymbolicTensor]) -> str:
    return ", ".join(str(t.region) for t in members[:4])


_OPERATIONS: dict[Conversion, Callable[[Mesh, Move, list[SymbolicTensor], Sequence[int]], list[SymbolicTensor]]] = {
    Conversion.SLICE: _slice,
    Conversion.KEEP_FIRST: _keep_first,
    Conversion.ALL_REDUCE: _all_reduce,
    Conversion.REDUCE_SCATTER: _reduce_scatter,
    Conversion.ALL_GATHER: _all_gather,
    Conversion.ALL_TO_ALL: _all_to_all,
}
