# SPDX-License-Identifier: Apache-2.0
"""What the product of a few rows takes. Nothing here needs torch."""

from __future__ import annotations

from typing import Final

MAX_ROWS: Final = 16
"""Two instructions' worth; with more rows the products of cuBLAS have enough to do."""
OUT_MULTIPLE: Final = 16
IN_MULTIPLE: Final = 64
DTYPE: Final = "bfloat16"
LEAST_WEIGHT_BYTES: Final = 4 << 20
"""Of a layer of an engine that is taken over: the operation costs a step that is in no CUDA graph a few microseconds of the host."""
MOST_WEIGHT_BYTES: Final = 128 << 20
"""The same at most: cuBLAS reads larger weights at the speed of a copy (192 MiB in 49.0 us, where ours took 50.4)."""
MEASURED_DEVICES: Final = ("H200",)
"""In the names of the GPUs on which it was measured faster than cuBLAS."""


_FEWER_ROWS: Final = 8
_BLOCKS: Final = 2
"""Of the kernel, at once on a multiprocessor."""


def gains(num_rows: int, out: int, num_multiprocessors: int) -> bool:
    """Whether a product is worth the kernel rather than cuBLAS, by what was measured.

    Not with more than 8 rows when the blocks come in two rounds of which the second one is part empty (16 x 6144 x 4096 took 16.8 us,
    and 15.8 with cuBLAS).
    """
    rounds = out / OUT_MULTIPLE / (_BLOCKS * num_multiprocessors)
    return num_rows <= _FEWER_ROWS or not 1 < rounds < 2


def refusal(out: int, in_values: int, dtype: str) -> str | None:
    """Why the kernel does not take a weight `[out, in_values]`, or None."""
    if dtype != DTYPE:
        return f"dtype {dtype}, allowed: {DTYPE}"
    if out < OUT_MULTIPLE or out % OUT_MULTIPLE:
        return f"out={out}, allowed: multiples of {OUT_MULTIPLE}"
    if in_values < IN_MULTIPLE or in_values % IN_MULTIPLE:
        return f"in={in_values}, allowed: multiples of {IN_MULTIPLE}"
    return None
