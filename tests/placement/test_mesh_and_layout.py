# SPDX-License-Identifier: Apache-2.0
"""Named axes over shared devices, nested shards, and refusals that name the sizes."""

from __future__ import annotations

import itertools

import pytest

from tokenspeed_plugin.placement import PlacementError, Replicate, Shard
from tokenspeed_plugin.placement.layout import interval, local_length, spread
from tokenspeed_plugin.placement.mesh import Extent, Mesh


def mesh_8() -> Mesh:
    """attn=tp2, moe=ep8 in a world of 8: two atoms, four outside and two inside."""
    return Mesh.from_extents(8, {"attn_tp": Extent(1, 2), "ep": Extent(1, 8), "dp": Extent(2, 4)})


def test_axes_share_atoms() -> None:
    mesh = mesh_8()
    assert mesh.atom_sizes == (4, 2)
    assert (mesh.atoms("dp"), mesh.atoms("attn_tp"), mesh.atoms("ep")) == ((0,), (1,), (0, 1))


def test_groups_are_the_ranks_that_differ_along_the_axis() -> None:
    mesh = mesh_8()
    assert list(mesh.groups(mesh.atoms("attn_tp"))) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert list(mesh.groups(mesh.atoms("dp"))) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert list(mesh.groups(mesh.atoms("ep"))) == [tuple(range(8))]


def test_label_is_the_axis_with_these_devices() -> None:
    mesh = mesh_8()
    assert [mesh.label(atoms) for atoms in ((0, 1), (0,), (1,))] == ["ep", "dp", "attn_tp"]


def test_groups_that_do_not_nest_are_refused_by_size() -> None:
    with pytest.raises(PlacementError, match="world size 12: group sizes 4 and 6 do not nest"):
        Mesh.from_extents(12, {"attn_tp": Extent(1, 4), "dense_tp": Extent(1, 6)})


def test_unknown_axis_names_the_known_ones() -> None:
    with pytest.raises(PlacementError, match="axis 'sp' is not one of attn_tp, ep, dp"):
        mesh_8().atoms("sp")


def test_two_placements_on_one_device_are_refused() -> None:
    with pytest.raises(PlacementError, match="axis 'ep' asks for S0 on devices that another axis declares R"):
        spread(mesh_8(), {"attn_tp": Replicate(), "ep": Shard(0)})


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 1000])
def test_uneven_nested_parts_cover_the_dimension_once(length: int) -> None:
    mesh = mesh_8()
    parts = [interval(mesh, (0, 1), length, rank) for rank in range(8)]
    assert parts[0][0] == 0
    assert parts[-1][1] == length
    assert all(before[1] == after[0] for before, after in itertools.pairwise(parts))
    assert max(high - low for low, high in parts) <= local_length(mesh, (0, 1), length)
