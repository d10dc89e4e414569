# SPDX-License-Identifier: Apache-2.0
"""The solutions of all-reduce + residual add + RMS norm that come with this package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenspeed_plugin.kernels.comm.library import SOURCES
from tokenspeed_plugin.kernels.comm.limits import LANE_ELEMENTS, MAX_HIDDEN, MAX_ROWS, RANK_COUNTS
from tokenspeed_plugin.kernels.registry import (
    Capability,
    KernelSpec,
    Objective,
    OperandFormat,
    Priority,
    ShapeTrait,
    Signature,
)
from tokenspeed_plugin.kernels.solution_parts import source_hash

FAMILY, MODE = "comm", "all_reduce_add_norm"


def signature(dtype: str) -> Signature:
    """All operands in one type."""
    return {operand: OperandFormat(dtype) for operand in ("branch", "residual")}


def _reference() -> Callable[..., Any]:
    from tokenspeed_plugin.kernels.comm.reference import all_reduce_add_norm_reference

    return all_reduce_add_norm_reference


def _cuda_sm90() -> Callable[..., Any]:
    from tokenspeed_plugin.kernels.comm.all_reduce_add_norm import AllReduceAddNorm

    return AllReduceAddNorm.__call__  # on what `workspace` made


def _workspace_sm90(*arguments: Any) -> Any:
    from tokenspeed_plugin.kernels.comm.all_reduce_add_norm import connect

    return connect(*arguments)


def _unavailable() -> str | None:
    """Whether two GPUs of this process can write each other's memory, and the library can be had."""
    import torch

    if torch.cuda.device_count() < 2:
        return f"{torch.cuda.device_count()} GPUs are visible, at least 2 are needed"
    if not torch.cuda.can_device_access_peer(0, 1):
        return "GPU 0 cannot access the memory of GPU 1"
    return SOURCES.unavailable_reason()


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
        signatures=(signature("bfloat16"), signature("float16")),
        load=_cuda_sm90,
        priority=Priority.SPECIALIZED,
        traits=(
            ShapeTrait("hidden", LANE_ELEMENTS, MAX_HIDDEN),
            ShapeTrait("rows", 1, MAX_ROWS),
            ShapeTrait("num_ranks", allowed=frozenset(RANK_COUNTS)),
        ),
        objectives=frozenset(Objective),  # the sum has the order of the ranks, the norm an order of its own
        unavailable=_unavailable,
        workspace=_workspace_sm90,
        source=SOURCES.source_hash,
    ),
)
