# SPDX-License-Identifier: Apache-2.0
"""The same bytes by all their names: as copied, as keys, as values, as queries, as probabilities."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream

from tokenspeed_plugin.kernels.mla.geometry import ROPE_DIMS, TILE_TOKENS
from tokenspeed_plugin.kernels.mla.sm100.arithmetic import probability_offset, query_offset
from tokenspeed_plugin.kernels.mla.sm100.layout import SLOT_DIMS
from tokenspeed_plugin.kernels.mla.sm100.operands import STEP_BYTES, DecodeVariant
from tokenspeed_plugin.kernels.mla.sm100.report import variant_of

VARIANTS = [
    (16, 1, 64, "bfloat16"),
    (32, 1, 16, "bfloat16"),
    (64, 1, 32, "bfloat16"),
    (16, 1, 16, "float8_e4m3fn"),
    (32, 1, 64, "float8_e4m3fn"),
    (64, 1, 128, "float8_e4m3fn"),
]
CHOICE = random.Random(6)


class Check:
    """Runs a check where layouts can be evaluated: while something is compiled."""

    def __init__(self, check: Any) -> None:
        self.check = check

    @cute.jit
    def __call__(self, stream: Any) -> None:
        self.check()


@pytest.fixture(params=VARIANTS, ids=lambda shape: f"{shape[0]}-{shape[2]}-{shape[3]}")
def variant(request: pytest.FixtureRequest) -> DecodeVariant:
    return variant_of(*request.param)


def evaluated(check: Any) -> None:
    cute.compile(Check(check), make_fake_stream(), options="--gpu-arch sm_100a")


def picks(*sizes: int, count: int = 40) -> list[tuple[int, ...]]:
    return [tuple(CHOICE.randrange(size) for size in sizes) for _ in range(count)]


def test_keys_and_values_are_where_the_copies_put_them(variant: DecodeVariant) -> None:
    layout, box = variant.layout, variant.box_tokens
    step, block = STEP_BYTES // layout.element_bytes, layout.block_dims

    def check() -> None:
        copied, keys = variant.boxes(block, SLOT_DIMS, layout.latent_slots), variant.latent_keys()
        values = variant.values()
        assert str(variant.box(block).inner) == str(keys.inner) == str(values.inner)
        for token, dim, slot in picks(TILE_TOKENS, SLOT_DIMS, layout.latent_slots):
            at = copied(((token % box, dim % block), token // box, dim // block, slot))
            assert at == keys.outer(((token, dim % step), 0, dim // step, slot))
            assert at == values.outer(((dim, token % step), 0, token // step, slot))

    evaluated(check)


def test_rope_keys_are_where_the_copies_put_them(variant: DecodeVariant) -> None:
    layout, box = variant.layout, variant.box_tokens
    step = STEP_BYTES // layout.element_bytes

    def check() -> None:
        copied, keys = variant.boxes(ROPE_DIMS, ROPE_DIMS, layout.rope_slots), variant.rope_keys()
        assert str(variant.box(ROPE_DIMS).inner) == str(keys.inner)
        for token, dim, slot in picks(TILE_TOKENS, ROPE_DIMS, layout.rope_slots):
            at = copied(((token % box, dim), token // box, 0, slot))
            assert at == keys.outer(((token, dim % step), 0, dim // step, slot))

    evaluated(check)


def placed(operand: Any, coordinate: Any, size: int) -> int:
    """Byte of an element: S<b,4,3> flips b bits from bit 4 on by those three further up."""
    bits, base, shift = map(int, re.findall(r"\d+", str(operand.inner)))
    offset = operand.outer(coordinate) * size
    return offset ^ (offset >> shift & ((1 << bits) - 1) << base)


def test_query_units_are_where_the_scores_read_them(variant: DecodeVariant) -> None:
    layout = variant.layout
    size, step = layout.element_bytes, STEP_BYTES // layout.element_bytes

    def check() -> None:
        for operand, dims, row_bytes in (
            (variant.latent_queries(), 512, 128),
            (variant.rope_queries(), 64, variant.rope_row_bytes),
        ):
            for row, unit in picks(layout.rows, dims * size // 16):
                dim = unit * 16 // size
                read = placed(operand, ((row, dim % step), 0, dim // step, 0), size)
                assert query_offset(row, unit, layout.rows, row_bytes) == read

    evaluated(check)


def test_probabilities_are_where_the_products_read_them(variant: DecodeVariant) -> None:
    layout = variant.layout
    size, step = layout.element_bytes, STEP_BYTES // layout.element_bytes

    def check() -> None:
        operand = variant.probabilities()
        for token, row in picks(TILE_TOKENS, layout.rows):
            read = placed(operand, ((row, token % step), 0, token // step, 0), size)
            assert probability_offset(token, row, layout.rows, size) == read

    evaluated(check)
