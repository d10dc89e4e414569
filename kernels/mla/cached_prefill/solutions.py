# SPDX-License-Identifier: Apache-2.0
"""The solutions of MLA prefill on a cached prefix: ours, the definition, and the two ways in which the host does it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenspeed_plugin.kernels.mla.solutions import BF16, HOPPER
from tokenspeed_plugin.kernels.mla.unfold.library import SOURCES as UNFOLD
from tokenspeed_plugin.kernels.registry import (
    Capability,
    KernelSpec,
    Objective,
    OperandFormat,
    Priority,
    ShapeTrait,
)
from tokenspeed_plugin.kernels.solution_parts import left_to_vllm, missing_package, source_hash

_HERE = Path(__file__).parent
MODE = "cached_prefill"
OURS, ABSORBED, UNFOLDED = "head_groups", "flashattn3", "unfolded"
"""Ours, and vLLM's two: queries carried into the latent space, or keys and values of the prefix made in chunks."""
OURS_TMA = "head_groups_tma"
"""Ours with one kernel in place of gather and products."""
TUNED = (OURS, ABSORBED, UNFOLDED)
"""Those whose measurements selection weighs."""
HOST_BACKEND = "FLASH_ATTN_MLA"
ABSORBED_QUERY_TOKENS = 512
"""New tokens of a request up to which vLLM's FlashAttention MLA carries queries into the latent space."""


def _reference() -> Callable[..., Any]:
    from tokenspeed_plugin.kernels.mla.cached_prefill.reference import mla_cached_prefill_reference

    return mla_cached_prefill_reference


def _head_groups() -> Callable[..., Any]:
    from tokenspeed_plugin.kernels.mla.cached_prefill.prefill import mla_cached_prefill

    return mla_cached_prefill


def _plan_head_groups(*arguments: Any) -> Any:
    from tokenspeed_plugin.kernels.mla.cached_prefill.prefill import plan_cached_prefill

    return plan_cached_prefill(*arguments)


def _plan_head_groups_tma(*arguments: Any) -> Any:
    from tokenspeed_plugin.kernels.mla.cached_prefill.prefill import plan_cached_prefill
    from tokenspeed_plugin.kernels.mla.unfold.unfold import paged_unfold

    return functools.partial(plan_cached_prefill, plan_making=paged_unfold)(*arguments)


def _unavailable_tma() -> str | None:
    return missing_package("vllm") or UNFOLD.unavailable_reason()


def _source_tma() -> str:
    return f"{source_hash(_HERE / 'groups.py', _HERE / 'prefill.py')} {UNFOLD.source_hash()}"


SOLUTIONS = (
    KernelSpec(
        "mla",
        MODE,
        "reference",
        capabilities=(Capability("cpu"), Capability("cuda"), Capability("rocm")),
        signatures=(BF16, {operand: OperandFormat("float32") for operand in BF16}),
        load=_reference,
        priority=Priority.REFERENCE,
        objectives=frozenset(Objective),
        source=functools.partial(source_hash, _HERE / "reference.py"),
    ),
    KernelSpec(
        "mla",
        MODE,
        OURS,
        capabilities=(HOPPER,),
        signatures=(BF16,),
        load=_head_groups,
        plan=_plan_head_groups,
        priority=Priority.PORTABLE,
        traits=(ShapeTrait("heads", 1, 128), ShapeTrait("page_tokens", 1)),
        unavailable=functools.partial(missing_package, "triton", "vllm"),
        source=functools.partial(
            source_hash, *(_HERE / name for name in ("groups.py", "making.py", "packing.py", "prefill.py"))
        ),
    ),
    KernelSpec(
        "mla",
        MODE,
        OURS_TMA,
        capabilities=(HOPPER,),
        signatures=(BF16,),
        load=_head_groups,
        plan=_plan_head_groups_tma,
        priority=Priority.UNTRIED,
        traits=(ShapeTrait("heads", 1, 128), ShapeTrait("page_tokens", 16, power_of_two=True)),
        unavailable=_unavailable_tma,
        source=_source_tma,
        prepare=UNFOLD.built,
    ),
    KernelSpec(
        "mla",
        MODE,
        ABSORBED,
        capabilities=(HOPPER,),
        signatures=(BF16,),
        load=left_to_vllm(HOST_BACKEND),
        priority=Priority.PERFORMANT,
        traits=(
            ShapeTrait("query_tokens", 1, ABSORBED_QUERY_TOKENS),
            ShapeTrait("page_tokens", 16, power_of_two=True),
        ),
        host_backend=HOST_BACKEND,
        unavailable=functools.partial(missing_package, "vllm"),
    ),
    KernelSpec(
        "mla",
        MODE,
        UNFOLDED,
        capabilities=(HOPPER,),
        signatures=(BF16,),
        load=left_to_vllm(HOST_BACKEND),
        priority=Priority.PERFORMANT,
        traits=(
            ShapeTrait("query_tokens", ABSORBED_QUERY_TOKENS + 1),
            ShapeTrait("page_tokens", 16, power_of_two=True),
        ),
        host_backend=HOST_BACKEND,
        unavailable=functools.partial(missing_package, "vllm"),
    ),
)
