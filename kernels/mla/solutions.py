# SPDX-License-Identifier: Apache-2.0
"""The solutions of MLA that come with this package, and those of the host that selection may leave the work to."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenspeed_plugin.kernels.mla.sm90.library import SOURCES
from tokenspeed_plugin.kernels.registry import (
    Capability,
    KernelSpec,
    Objective,
    OperandFormat,
    Priority,
    ShapeTrait,
    Signature,
)

BF16: Signature = {"q": OperandFormat("bfloat16"), "kv": OperandFormat("bfloat16")}
HOPPER = Capability("cuda", (9, 0), (9, 1))


def _reference() -> Callable[..., Any]:
    from tokenspeed_plugin.kernels.mla.reference import mla_decode_reference

    return mla_decode_reference


def _triton() -> Callable[..., Any]:
    from tokenspeed_plugin.kernels.mla.triton_decode import mla_decode_triton

    return mla_decode_triton


def _cuda_sm90() -> Callable[..., Any]:
    from tokenspeed_plugin.kernels.mla.sm90.decode import mla_decode

    return mla_decode


def _plan_sm90(*arguments: Any) -> Any:
    from tokenspeed_plugin.kernels.mla.sm90.decode import MlaDecodePlan

    return MlaDecodePlan(*arguments)


def _workspace_sm90(*arguments: Any) -> Any:
    from tokenspeed_plugin.kernels.mla.sm90.decode import MlaWorkspace

    return MlaWorkspace(*arguments)


def _file_hash(name: str) -> str:
    return hashlib.sha256(Path(__file__).with_name(name).read_bytes()).hexdigest()[:16]


def _missing(module: str) -> str | None:
    return None if importlib.util.find_spec(module) is not None else f"the package {module} is not installed"


def _host(backend: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        raise RuntimeError(f"{backend} is a backend of vLLM: leave the choice to vLLM instead of calling it from here")

    return load


SOLUTIONS = (
    KernelSpec(
        "mla",
        "decode",
        "reference",
        capabilities=(Capability("cpu"), Capability("cuda"), Capability("rocm")),
        signatures=(BF16, {operand: OperandFormat("float32") for operand in BF16}),
        load=_reference,
        priority=Priority.REFERENCE,
        objectives=frozenset(Objective),
        source=functools.partial(_file_hash, "reference.py"),
    ),
    KernelSpec(
        "mla",
        "decode",
        "triton",
        capabilities=(Capability("cuda", (8, 0)), Capability("rocm", (9, 4))),
        signatures=(BF16,),
        load=_triton,
        priority=Priority.PORTABLE,
        objectives=frozenset(Objective),  # the parts of a request depend on its own length alone
        unavailable=functools.partial(_missing, "triton"),
        source=functools.partial(_file_hash, "triton_decode.py"),
    ),
    KernelSpec(
        "mla",
        "decode",
        "cuda_sm90",
        capabilities=(HOPPER,),
        signatures=(BF16,),
        load=_cuda_sm90,
        priority=Priority.SPECIALIZED,
        traits=(
            ShapeTrait("heads", 1, 128),
            ShapeTrait("query_tokens", 1, 8),
            ShapeTrait("page_tokens", 1, power_of_two=True),
        ),
        unavailable=SOURCES.unavailable_reason,
        plan=_plan_sm90,
        workspace=_workspace_sm90,
        source=SOURCES.source_hash,
    ),
    KernelSpec(
        "mla",
        "decode",
        "flashmla",
        capabilities=(HOPPER,),
        signatures=(BF16,),
        load=_host("FLASHMLA"),
        priority=Priority.PERFORMANT,
        traits=(ShapeTrait("page_tokens", allowed=frozenset({64})),),
        host_backend="FLASHMLA",
        unavailable=functools.partial(_missing, "vllm"),
    ),
    KernelSpec(
        "mla",
        "decode",
        "flashattn3",
        capabilities=(HOPPER,),
        signatures=(BF16,),
        load=_host("FLASH_ATTN_MLA"),
        priority=Priority.PERFORMANT,
        traits=(ShapeTrait("page_tokens", 16, power_of_two=True),),
        host_backend="FLASH_ATTN_MLA",
        unavailable=functools.partial(_missing, "vllm"),
    ),
)

BENCHMARK_NAMES = {"ours": "cuda_sm90", "FlashMLA": "flashmla", "FlashAttention 3": "flashattn3"}
"""Solutions by the names that `benchmarks.mla` writes into its JSON."""


def decode_shape(heads: int, query_tokens: int, page_tokens: int, requests: int, context_tokens: int) -> dict[str, int]:
    """The shape numbers of MLA decode, by which it is filtered and tuned."""
    return {
        "heads": heads,
        "query_tokens": query_tokens,
        "page_tokens": page_tokens,
        "requests": requests,
        "context_tokens": context_tokens,
    }
