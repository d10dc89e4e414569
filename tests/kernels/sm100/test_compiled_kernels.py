# SPDX-License-Identifier: Apache-2.0
"""The Blackwell kernels compile with no GPU, to the instructions that they are written for, without spills."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import triton

from tokenspeed_plugin.kernels.mla.sm100.compiling import (
    DECODE,
    MERGE,
    PLAN,
    arguments,
    compile_decode,
    compile_merge,
    compile_plan,
)
from tokenspeed_plugin.kernels.mla.sm100.layout import LayoutError
from tokenspeed_plugin.kernels.mla.sm100.report import CompiledKernel, compiled_kernel, compiled_kernels, variant_of

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
# Of heads, query tokens, page tokens, element, architecture: the largest tile, and FP8 in pages of a quarter tile.
VARIANTS = {
    "bf16": (16, 4, 64, "bfloat16", "sm_100a"),
    "fp8": (8, 1, 16, "float8_e4m3fn", "sm_103a"),
}
# N, M and transposed operands of the two products, as the instruction descriptor holds them (PTX ISA, tcgen05):
# fp32 sums at bit 4, formats at 7 and 10, A and B transposed at 15 and 16, N / 8 at 17, M / 16 at 24.
FP32, BF16, TRANSPOSED = 1 << 4, 1 << 7 | 1 << 10, 1 << 15 | 1 << 16
DESCRIPTORS = {
    "bf16": {FP32 | BF16 | 8 << 17 | 4 << 24, FP32 | BF16 | TRANSPOSED | 8 << 17 | 8 << 24},
    "fp8": {FP32 | 2 << 17 | 4 << 24, FP32 | TRANSPOSED | 2 << 17 | 8 << 24},
}


@pytest.fixture(scope="module", params=VARIANTS)
def compiled(request: pytest.FixtureRequest) -> tuple[str, dict[str, CompiledKernel]]:
    *shape, arch = VARIANTS[request.param]
    return request.param, {kernel.name: kernel for kernel in compiled_kernels(variant_of(*shape), arch)}


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    said = subprocess.run([CUOBJDUMP, "-res-usage", file], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}


def test_nothing_spills_and_nothing_lies_in_local_memory(compiled, tmp_path: Path) -> None:
    for kernel in compiled[1].values():
        assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), kernel.name
        used = resources(kernel.cubin, tmp_path)
        assert (used["STACK"], used["LOCAL"]) == (0, 0), kernel.name
        assert used["REG"] == kernel.registers <= 255


def test_the_decode_kernel_is_made_of_the_instructions_of_the_chip(compiled) -> None:
    name, kernels = compiled
    ptx = kernels["decode"].ptx
    assert f".target {VARIANTS[name][-1]}" in ptx
    for instruction in (
        f"tcgen05.mma.cta_group::1.kind::{'f16' if name == 'bf16' else 'f8f6f4'}",
        "tcgen05.alloc.cta_group::1",
        "tcgen05.dealloc.cta_group::1",
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one",
        "tcgen05.ld.sync.aligned.16x256b",
        "tcgen05.ld.sync.aligned.32x32b",
        "tcgen05.st.sync.aligned.32x32b",
        "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes",
        "fence.proxy.async.shared::cta",
    ):
        assert instruction in ptx, instruction


def test_the_products_have_the_shapes_of_the_layout(compiled) -> None:
    """Scores: 64 tokens x 576 dims. Output: four times 128 dims x 64 tokens."""
    name, kernels = compiled
    ptx = kernels["decode"].ptx
    steps = 16 if name == "bf16" else 32
    assert ptx.count("tcgen05.mma.") == 576 // steps + 4 * (64 // steps)
    described = set(map(int, re.findall(r"mov\.b32 \t%r\d+, (\d{6,});", ptx)))
    assert described >= DESCRIPTORS[name]


def test_a_box_of_every_block_of_dims_is_copied(compiled) -> None:
    """bf16: nine blocks of 64 dims, one box each; FP8 in pages of 16: four blocks of 128 dims and one of 64, four boxes each."""
    name, kernels = compiled
    assert kernels["decode"].ptx.count("cp.async.bulk.tensor") == {"bf16": 9, "fp8": 5 * 4}[name]


def test_the_registers_of_a_block_are_there(compiled) -> None:
    """256 threads share 65,536 registers, handed out in units of 8 per thread."""
    registers = -(-compiled[1]["decode"].registers // 8) * 8
    assert registers * 256 <= 65536


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latent_slots": 9}, "shared memory: 248304 bytes used, 231904 asked for"),
        ({"latent_slots": 9, "shared_bytes": 248304}, "shared memory: 248304 bytes, at most 232448"),
        ({"tensor_columns": 256}, "tensor memory: 384 columns used, 256 allocated"),
    ],
)
def test_a_kernel_that_asks_for_too_much_is_not_compiled(change: dict[str, int], message: str) -> None:
    variant = variant_of(64, 1, 64, "bfloat16")
    with pytest.raises(LayoutError, match=message):
        compile_decode(replace(variant, layout=replace(variant.layout, **change)))


@pytest.mark.parametrize("names", [DECODE, PLAN, MERGE])
def test_a_launch_has_an_argument_for_every_parameter(names: tuple[str, ...]) -> None:
    variant = variant_of(64, 1, 64, "bfloat16")
    values = arguments(names, variant, {"page_shift": 7, "kv_strides": (5, 3), "seq_lens": 4096}, 0)
    by_name = dict(zip(names, values, strict=False))
    assert len(values) == len(names) + 1  # and a stream
    assert by_name.get("page_shift", 7) == 7
    assert by_name.get("kv_strides", (5, 3)) == (5, 3)


def test_plan_and_merge_compile_for_hopper_too() -> None:
    """They have nothing of Blackwell in them, so that a machine with a Hopper GPU can run them."""
    variant = variant_of(16, 1, 64, "bfloat16")
    for kernel in (
        compiled_kernel("plan", lambda options: compile_plan(options, "sm_90a")),
        compiled_kernel("merge", lambda options: compile_merge(variant, options, "sm_90a")),
    ):
        assert ".target sm_90a" in kernel.ptx
        assert kernel.spill_bytes == 0
