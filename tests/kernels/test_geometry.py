# SPDX-License-Identifier: Apache-2.0
"""How query rows fold into row tiles."""

import pytest

from tokenspeed_plugin.kernels.mla.geometry import FP8_ROWS, NARROW_ROWS, WIDE_ROWS, RowTiles


@pytest.mark.parametrize(
    ("heads", "queries", "expected"),
    [
        (16, 1, RowTiles(16, 16, 1, 1, 1)),
        (8, 2, RowTiles(16, 8, 2, 1, 1)),
        (16, 2, RowTiles(64, 16, 2, 1, 1)),
        (16, 4, RowTiles(64, 16, 4, 1, 1)),
        (16, 5, RowTiles(64, 16, 3, 1, 2)),
        (64, 1, RowTiles(64, 64, 1, 1, 1)),
        (96, 1, RowTiles(64, 48, 1, 2, 1)),
        (128, 4, RowTiles(64, 64, 1, 2, 4)),
    ],
)
def test_folds(heads: int, queries: int, expected: RowTiles) -> None:
    assert RowTiles.fold(heads, queries) == expected


def test_every_row_has_exactly_one_place() -> None:
    for heads in range(1, 129):
        for queries in range(1, 9):
            tiles = RowTiles.fold(heads, queries)
            assert tiles.heads * tiles.query_tokens <= tiles.rows
            assert (tiles.head_tiles - 1) * tiles.heads < heads <= tiles.head_tiles * tiles.heads
            assert (tiles.token_tiles - 1) * tiles.query_tokens < queries <= tiles.token_tiles * tiles.query_tokens


def test_the_grid_never_outgrows_the_gpu_where_requests_may_be_split() -> None:
    for heads in (8, 16, 64, 128):
        for queries in (1, 4, 8, 512):
            tiles = RowTiles.fold(heads, queries)
            groups = tiles.groups(132)
            assert groups == 1 or groups * tiles.row_tiles <= 132


def test_a_single_tile_size_serves_everything() -> None:
    assert RowTiles.fold(64, 2, (NARROW_ROWS,)) == RowTiles(16, 16, 1, 4, 2)
    assert RowTiles.fold(4, 1, (WIDE_ROWS,)) == RowTiles(64, 4, 1, 1, 1)


@pytest.mark.parametrize(("heads", "queries"), [(0, 1), (1, 0)])
def test_counts_are_positive(heads: int, queries: int) -> None:
    with pytest.raises(ValueError, match=f"num_heads={heads}, max_query_tokens={queries}"):
        RowTiles.fold(heads, queries)


@pytest.mark.parametrize(
    ("heads", "queries", "expected"),
    [
        (16, 1, RowTiles(16, 16, 1, 1, 1)),
        (32, 1, RowTiles(32, 32, 1, 1, 1)),
        (16, 4, RowTiles(64, 16, 4, 1, 1)),
        (128, 1, RowTiles(64, 64, 1, 2, 1)),
    ],
)
def test_folds_of_the_fp8_version(heads: int, queries: int, expected: RowTiles) -> None:
    assert RowTiles.fold(heads, queries, FP8_ROWS) == expected
