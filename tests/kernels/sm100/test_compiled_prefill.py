# SPDX-License-Identifier: Apache-2.0
"""The Blackwell prefill kernel compiles with no GPU; its operands are where the copies and the softmax put them."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream

from tokenspeed_plugin.kernels.mla.sm100.arithmetic import swizzled
from tokenspeed_plugin.kernels.mla.sm100.compiling import PREFILL, arguments, compile_prefill
from tokenspeed_plugin.kernels.mla.sm100.layout import LayoutError
from tokenspeed_plugin.kernels.mla.sm100.prefill.arithmetic import probability_offset
from tokenspeed_plugin.kernels.mla.sm100.prefill.block import PrefillVariant
from tokenspeed_plugin.kernels.mla.sm100.prefill.layout import PrefillLayout
from tokenspeed_plugin.kernels.mla.sm100.report import compiled_prefill

CHOICE = random.Random(192)
# N = 128, M = 128, bf16, fp32 sums; B of the output is transposed (bit 16).
SCORES = 1 << 4 | 1 << 7 | 1 << 10 | 16 << 17 | 8 << 24
DESCRIPTORS = {SCORES, SCORES | 1 << 16}


def test_it_compiles_to_the_instructions_of_the_chip_without_spills() -> None:
    kernel = compiled_prefill()
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
    assert -(-kernel.registers // 8) * 8 * 256 <= 65536
    assert ".target sm_100a" in kernel.ptx
    # 192 dims of keys and 128 tokens of values, 16 at a time; three boxes of queries, three of keys, two of values.
    assert kernel.ptx.count("tcgen05.mma.cta_group::1.kind::f16") == 192 // 16 + 128 // 16
    assert kernel.ptx.count("cp.async.bulk.tensor.3d") == 3 + 3 + 2
    assert set(map(int, re.findall(r"mov\.b32 \t%r\d+, (\d{6,});", kernel.ptx))) >= DESCRIPTORS
    for instruction in ("tcgen05.alloc", "tcgen05.dealloc", "tcgen05.commit", "tcgen05.ld.sync", "tcgen05.st.sync"):
        assert instruction in kernel.ptx


class Check:
    """Runs a check where layouts can be evaluated: while something is compiled."""

    def __init__(self, check: Any) -> None:
        self.check = check

    @cute.jit
    def __call__(self, stream: Any) -> None:
        self.check()


def test_operands_are_where_copies_and_softmax_put_them() -> None:
    variant = PrefillVariant()

    def check() -> None:
        queries, keys, values, probs = variant.queries(), variant.keys(), variant.values(), variant.probabilities()
        copied = variant.boxes(16)
        assert {str(x.inner) for x in (queries, keys, values, probs, variant.box())} == {"S<3,4,3>"}
        for _ in range(60):
            token, dim, slot = CHOICE.randrange(128), CHOICE.randrange(192), CHOICE.randrange(2)
            assert copied(((token, dim % 64), dim // 64)) == queries.outer(((token, dim % 16), 0, dim // 16, 0))
            key = ((token, dim % 16), 0, dim % 64 // 16, slot)
            assert copied(((token, dim % 64), slot)) == keys.outer(key)
            dim %= 128
            value = ((dim, token % 16), 0, token // 16, slot)
            assert copied(((token, dim % 64), 2 * slot + dim // 64)) == values.outer(value)
            row, unit = token, CHOICE.randrange(16)
            element = probs.outer(((row, unit * 8 % 16), 0, unit * 8 // 16, 0))
            assert probability_offset(row, unit) == swizzled(element * 2, 128)

    cute.compile(Check(check), make_fake_stream(), options="--gpu-arch sm_100a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_slots": 6}, "shared memory: 245952 bytes used, 229552 asked for"),
        ({"value_slots": 3, "shared_bytes": 262336}, "shared memory: 262336 bytes, at most 232448"),
        ({"shared_bytes": 229552 // 2}, "shared memory: 229552 bytes used, 114776 asked for"),
        ({"tensor_columns": 256}, r"tensor memory: 384 columns used, 256 allocated \(scores 256, output 128\)"),
        ({"value_slots": 1}, "rings: 5 key and 1 value slots, at least 3 and 2"),
    ],
)
def test_a_kernel_that_asks_for_too_much_is_not_compiled(change: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        compile_prefill(PrefillVariant(layout=replace(PrefillLayout(), **change)))


def test_the_layout_asks_for_what_it_uses() -> None:
    layout = PrefillLayout()
    assert layout.checked().shared_bytes == sum(layout.parts().values())


def test_a_launch_has_an_argument_for_every_parameter() -> None:
    assert len(arguments(PREFILL, None, {}, 0)) == len(PREFILL) + 1
