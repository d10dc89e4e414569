# SPDX-License-Identifier: Apache-2.0
"""The solutions of linear layers of a few rows. All are called as `few_rows_reference` is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenspeed_plugin.kernels.linear.library import SOURCES
from tokenspeed_plugin.kernels.linear.limits import DTYPE, IN_MULTIPLE, MAX_ROWS, OUT_MULTIPLE
from tokenspeed_plugin.kernels.registry import (
    Capability,
    KernelSpec,
    Objective,
    OperandFormat,
    Priority,
    ShapeTrait,
    Signature,
)
from tokenspeed_plugin.kernels.solution_parts import left_to_vllm, missing_package, source_hash

FAMILY, MODE = "linear", "few_rows"
HOST_SOLUTION = "vllm"
"""vLLM's own layer: torch's product, which is cuBLAS's."""
_LAYER = "UnquantizedLinearMethod"


def signature(dtype: str) -> Signature:
    """Rows and weight in one type."""
    return {operand: OperandFormat(dtype) for operand in ("rows", "weight")}


def shape(rows: int, out: int, in_values: int) -> dict[str, int]:
    """The shape numbers of a product, by which it is filtered."""
    return {"rows": rows, "out": out, "in": in_values}


def _reference() -> Callable[..., Any]:
    from tokenspeed_plugin.kernels.linear.reference import few_rows_reference

    return few_rows_reference


def _cuda_sm90() -> Callable[..., Any]:
    from tokenspeed_plugin.kernels.linear.operation import few_rows_linear

    return few_rows_linear


SOLUTIONS = (
    KernelSpec(
        FAMILY,
        MODE,
        "reference",
        capabilities=(Capability("cpu"), Capability("cuda"), Capability("rocm")),
        signatures=tuple(signature(dtype) for dtype in ("bfloat16", "float16", "float32")),
        load=_reference,
        priority=Priority.REFERENCE,
        objectives=frozenset(Objective),
        source=functools.partial(source_hash, Path(__file__).with_name("reference.py")),
    ),
    KernelSpec(
        FAMILY,
        MODE,
        "cuda_sm90",
        capabilities=(Capability("cuda", (9, 0), (9, 1)),),
        signatures=(signature(DTYPE),),
        load=_cuda_sm90,
        priority=Priority.SPECIALIZED,
        traits=(
            ShapeTrait("rows", 1, MAX_ROWS),
            ShapeTrait("out", OUT_MULTIPLE),
            ShapeTrait("in", IN_MULTIPLE),
        ),
        objectives=frozenset(Objective),  # a row's sum has an order of its own
        unavailable=SOURCES.unavailable_reason,
        source=SOURCES.source_hash,
        prepare=SOURCES.built,
        serves_engine=True,
    ),
    KernelSpec(
        FAMILY,
        MODE,
        HOST_SOLUTION,
        capabilities=(Capability("cuda"), Capability("rocm")),
        signatures=(signature("bfloat16"), signature("float16")),
        load=left_to_vllm(_LAYER),
        priority=Priority.PERFORMANT,
        host_backend=_LAYER,
        unavailable=functools.partial(missing_package, "vllm"),
    ),
)
