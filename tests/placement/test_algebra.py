# SPDX-License-Identifier: Apache-2.0
"""The conversion table, entry by entry, and what it refuses."""

from __future__ import annotations

import pytest

from tokenspeed_plugin.placement import (
    Conversion,
    IllegalConversionError,
    Partial,
    Placement,
    PlacementError,
    Replicate,
    Shard,
    conversion,
)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (Replicate(), Replicate(), Conversion.NONE),
        (Replicate(), Shard(0), Conversion.SLICE),
        (Replicate(), Partial(), Conversion.KEEP_FIRST),
        (Shard(0), Replicate(), Conversion.ALL_GATHER),
        (Shard(0), Shard(0), Conversion.NONE),
        (Shard(0), Shard(1), Conversion.ALL_TO_ALL),
        (Partial(), Replicate(), Conversion.ALL_REDUCE),
        (Partial(), Shard(1), Conversion.REDUCE_SCATTER),
        (Partial(), Partial(), Conversion.NONE),
    ],
)
def test_table(source: Placement, target: Placement, expected: Conversion) -> None:
    assert conversion(source, target) is expected


def test_shard_to_partial_is_illegal_and_says_what_to_declare() -> None:
    with pytest.raises(IllegalConversionError, match=r"S0 to P.*declare Replicate between them"):
        conversion(Shard(0), Partial())


def test_a_sum_is_not_a_maximum() -> None:
    with pytest.raises(IllegalConversionError, match="a sum of parts is not a max of parts"):
        conversion(Partial("sum"), Partial("max"))


def test_bad_arguments_name_value_and_what_is_allowed() -> None:
    with pytest.raises(PlacementError, match=r"Partial\(op='mean'\): allowed reductions are sum, max"):
        Partial("mean")
    with pytest.raises(PlacementError, match=r"Shard\(dim=-1\)"):
        Shard(-1)


@pytest.mark.parametrize("kind", list(Conversion))
def test_local_operations_are_no_collectives(kind: Conversion) -> None:
    local = {Conversion.NONE, Conversion.SLICE, Conversion.KEEP_FIRST}
    assert kind.is_collective is (kind not in local)
