# SPDX-License-Identifier: Apache-2.0
"""Sequences of operations between layouts: order, coalescing and, on symbolic tensors, what they produce."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tokenspeed_plugin.placement import Conversion, IllegalConversionError, Partial, Placement, Replicate, Shard
from tokenspeed_plugin.placement.conversion_path import primitives
from tokenspeed_plugin.placement.layout import Layout, check_convertible, interval, partial_atoms, sharded_atoms, text
from tokenspeed_plugin.placement.mesh import Extent, Mesh
from tokenspeed_plugin.placement.plan import Move, Phase
from tokenspeed_plugin.placement.symbolic import Ranks, SymbolicTensor, Term, apply_move

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
LENGTHS = (10, 7)
MESH = Mesh.from_extents(12, {"outer": Extent(4, 3), "middle": Extent(2, 2), "inner": Extent(1, 2)})


def kinds(source: Layout, target: Layout) -> list[tuple[Conversion, tuple[int, ...]]]:
    return [(p.kind, p.atoms) for p in primitives(source, target)]


def test_neighbouring_atoms_share_one_collective() -> None:
    assert kinds((P, P), (R, R)) == [(Conversion.ALL_REDUCE, (0, 1))]
    assert kinds((S0, S0), (R, R)) == [(Conversion.ALL_GATHER, (0, 1))]
    assert kinds((P, P), (S0, S0)) == [(Conversion.REDUCE_SCATTER, (0, 1))]


def test_shrinking_comes_before_reducing_and_gathering_last() -> None:
    assert kinds((P, P), (S0, R)) == [(Conversion.REDUCE_SCATTER, (0,)), (Conversion.ALL_REDUCE, (1,))]
    assert kinds((S0, P), (R, R)) == [(Conversion.ALL_REDUCE, (1,)), (Conversion.ALL_GATHER, (0,))]
    assert kinds((R, P), (S0, R)) == [(Conversion.SLICE, (0,)), (Conversion.ALL_REDUCE, (1,))]


def test_an_inner_shard_is_gathered_before_an_outer_one_is_cut() -> None:
    assert kinds((R, S0), (S0, S0)) == [(Conversion.ALL_GATHER, (1,)), (Conversion.SLICE, (0, 1))]


def test_other_dimension_is_one_all_to_all() -> None:
    assert kinds((R, S0), (R, S1)) == [(Conversion.ALL_TO_ALL, (1,))]


def held(layout: Layout) -> Ranks:
    """Every rank's part of one value with one term per participant of the Partial atoms."""
    atoms = partial_atoms(layout)
    ranks = []
    for rank in range(MESH.world_size):
        region = [interval(MESH, sharded_atoms(layout, d), n, rank) for d, n in enumerate(LENGTHS)]
        site = tuple(MESH.coordinates(rank)[a] for a in atoms)
        ranks.append(SymbolicTensor.of(region, Counter({Term("x", site): 1})))
    return tuple(ranks)


def as_move(primitive_index: int, source: Layout, target: Layout) -> Move:
    p = primitives(source, target)[primitive_index]
    return Move(p.kind, "m", Phase.PRE, "a", "b", "x", p.before, p.after, p.atoms, p.dim, p.from_dim, p.op)


def reduced(ranks: Ranks, layout: Layout) -> list[tuple[object, Counter[Term]]]:
    """Region and terms of every group that shares a Partial value."""
    return [
        (ranks[g[0]].region, sum((ranks[r].counts for r in g), Counter())) for g in MESH.groups(partial_atoms(layout))
    ]


PLACEMENTS: tuple[Placement, ...] = (R, S0, S1, P)
PAIRS = list(itertools.product(itertools.product(PLACEMENTS, repeat=3), repeat=2))


def legal(source: Layout, target: Layout) -> bool:
    return not any(isinstance(s, Shard) and isinstance(t, Partial) for s, t in zip(source, target, strict=True))


@pytest.mark.parametrize("source", list(itertools.product(PLACEMENTS, repeat=3)), ids=text)
def test_every_legal_pair_of_layouts_converts_without_losing_or_repeating_anything(source: Layout) -> None:
    whole = Counter({term: 1 for tensor in held(source) for term, _ in tensor.terms})
    for target in itertools.product(PLACEMENTS, repeat=3):
        if not legal(source, target):
            continue
        ranks = held(source)
        for index in range(len(primitives(source, target))):
            ranks = apply_move(MESH, as_move(index, source, target), ranks)
        for rank in range(MESH.world_size):
            wanted = tuple(interval(MESH, sharded_atoms(target, d), n, rank) for d, n in enumerate(LENGTHS))
            assert ranks[rank].region == wanted, (text(source), text(target), rank)
        assert all(terms == whole for _, terms in reduced(ranks, target)), (text(source), text(target))


def test_an_illegal_conversion_names_both_modules_and_the_axis() -> None:
    with pytest.raises(IllegalConversionError, match="module 'a' produces S0 over axis 'inner' but module 'b' takes P"):
        check_convertible(MESH, (R, R, S0), (R, R, P), "module 'a'", "module 'b'")
