# SPDX-License-Identifier: Apache-2.0
"""What the product of a few rows takes. Nothing here needs torch."""

from __future__ import annotations

from typing import Final

MAX_ROWS: Final = 16
"""Two instructions' worth; with more rows the products of cuBLAS have enough to do."""
OUT_MULTIPLE: Final = 16
IN_MULTIPLE: Final = 64
DTYPE: Final = "bfloat16"
WEIGHT_BYTES: Final = 4 << 20
"""Of a weight, at least, for a layer of an engine to be taken over: the operation costs a step that is in no CUDA graph a few
microseconds of the host."""
MEASURED_DEVICES: Final = ("H200",)
"""In the names of the GPUs on which it was measured faster than cuBLAS."""


def refusal(out: int, in_values: int, dtype: str) -> str | None:
    """Why the kernel does not take a weight `[out, in_values]`, or None."""
    if dtype != DTYPE:
        return f"dtype {dtype}, allowed: {DTYPE}"
    if out < OUT_MULTIPLE or out % OUT_MULTIPLE:
        return f"out={out}, allowed: multiples of {OUT_MULTIPLE}"
    if in_values < IN_MULTIPLE or in_values % IN_MULTIPLE:
        return f"in={in_values}, allowed: multiples of {IN_MULTIPLE}"
    return None
