# SPDX-License-Identifier: Apache-2.0
"""What the compiler says of the kernels: registers, spills, and the code itself."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenspeed_plugin.kernels.mla.geometry import TILE_TOKENS, RowTiles
from tokenspeed_plugin.kernels.mla.sm100.compiling import (
    BLACKWELL,
    compile_decode,
    compile_merge,
    compile_plan,
    compile_prefill,
)
from tokenspeed_plugin.kernels.mla.sm100.layout import ROW_COUNTS, DecodeLayout
from tokenspeed_plugin.kernels.mla.sm100.operands import DecodeVariant
from tokenspeed_plugin.kernels.mla.sm100.prefill.block import PrefillVariant

_USED = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel's code and what the assembler reported about it."""

    name: str
    ptx: str
    cubin: bytes
    registers: int
    stack_bytes: int
    spill_bytes: int


def variant_of(num_heads: int, max_query_tokens: int, page_tokens: int, element: str) -> DecodeVariant:
    """The variant that serves these shapes."""
    tiles = RowTiles.fold(num_heads, max_query_tokens, ROW_COUNTS)
    layout = DecodeLayout.fitted(tiles.rows, element)
    return DecodeVariant(num_heads, max_query_tokens, min(page_tokens, TILE_TOKENS), tiles, layout)


def compiled_kernels(variant: DecodeVariant, arch: str = BLACKWELL) -> list[CompiledKernel]:
    """The three kernels of a variant: plan, decode, merge."""
    return [
        compiled_kernel("plan", lambda options: compile_plan(options, arch)),
        compiled_kernel("decode", lambda options: compile_decode(variant, options, arch)),
        compiled_kernel("merge", lambda options: compile_merge(variant, options, arch)),
    ]


def compiled_prefill(arch: str = BLACKWELL) -> CompiledKernel:
    """The causal prefill kernel."""
    return compiled_kernel("prefill", lambda options: compile_prefill(PrefillVariant(), options, arch))


def compiled_kernel(name: str, build: Callable[[str], Any]) -> CompiledKernel:
    """A kernel with the assembler's remarks.

    Args:
        name: to report it under.
        build: compiles it, given compiler options.

    Raises:
        RuntimeError: the compiler's remarks do not say what they used to.
    """
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            built = build(f"--keep-ptx --keep-cubin --dump-dir {folder} remarks{{ptx}}")
        ptx, cubin = built.__ptx__, built.__cubin__
    text = " ".join(said.getvalue().split())
    used, spilled = _USED.search(text), _SPILLED.search(text)
    if used is None or spilled is None:
        raise RuntimeError(f"{name}: the compiler reports no registers or spills: {text}")
    stack, stores, loads = map(int, spilled.groups())
    return CompiledKernel(name, ptx, cubin, int(used.group(1)), stack, stores + loads)
