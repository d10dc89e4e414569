# SPDX-License-Identifier: Apache-2.0
"""The solutions of MLA that come with this package, and those of the host that selection may leave the work to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenspeed_plugin.kernels.mla.sm90.library import FP8_SOURCES, SOURCES
from tokenspeed_plugin.kernels.mla.sm100.model import estimate_decode
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

_HERE = Path(__file__).parent
BF16: Signature = {"q": OperandFormat("bfloat16"), "kv": OperandFormat("bfloat16")}
PREFILL_BF16: Signature = {operand: OperandFormat("bfloat16") for operand in ("q", "k", "v")}
FP8: Signature = {
    "q": OperandFormat("float8_e4m3fn", "tensor"),
    "kv": OperandFormat("float8_e4m3fn", "tensor"),
}
BLACKWELL = Capability("cuda", (10, 0), (10, 4))
B200, B300 = Capability("cuda", (10, 0), (10, 1)), Capability("cuda", (10, 3), (10, 4))
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


def _cuda_sm90_fp8() -> Callable[..., Any]:
    from tokenspeed_plugin.kernels.mla.sm90.decode_fp8 import mla_decode_fp8

    return mla_decode_fp8


def _plan_sm90(*arguments: Any) -> Any:
    from tokenspeed_plugin.kernels.mla.sm90.decode import MlaDecodePlan

    return MlaDecodePlan(*arguments)


def _workspace_sm90(*arguments: Any) -> Any:
    from tokenspeed_plugin.kernels.mla.sm90.decode import MlaWorkspace

    return MlaWorkspace(*arguments)


def _workspace_sm90_fp8(*arguments: Any) -> Any:
    from tokenspeed_plugin.kernels.mla.sm90.decode_fp8 import fp8_workspace

    return fp8_workspace(*arguments)


def _prepare_sm90_fp8() -> Path:
    SOURCES.built()  # steps of both element types are planned by the bf16 library
    return FP8_SOURCES.built()


def _cute_sm100() -> Callable[..., Any]:
    from tokenspeed_plugin.kernels.mla.sm100.decode import mla_decode

    return mla_decode


def _prefill_reference() -> Callable[..., Any]:
    from tokenspeed_plugin.kernels.mla.prefill_reference import mla_prefill_reference

    return mla_prefill_reference


def _prefill_sm100() -> Callable[..., Any]:
    from tokenspeed_plugin.kernels.mla.sm100.prefill.prefill import mla_prefill

    return mla_prefill


def _plan_sm100(*arguments: Any) -> Any:
    from tokenspeed_plugin.kernels.mla.sm100.decode import MlaDecodePlan

    return MlaDecodePlan(*arguments)


def _workspace_sm100(*arguments: Any) -> Any:
    from tokenspeed_plugin.kernels.mla.sm100.decode import MlaWorkspace

    return MlaWorkspace(*arguments)


def _unavailable_sm100() -> str | None:
    from tokenspeed_plugin.kernels.mla.sm100.decode import unavailable_reason

    return unavailable_reason()


def _remark_sm100(shape: Mapping[str, int], signature: Signature) -> str:
    if not {"heads", "query_tokens", "requests", "context_tokens"} <= shape.keys():
        return "never run on hardware"
    estimate = estimate_decode(shape, signature["kv"].dtype)
    return (
        f"never run on hardware; a model of the B200 expects {estimate.expected_us:.1f} us, bound by {estimate.bound}"
    )


def _source_sm100() -> str:
    return source_hash(*sorted((_HERE / "sm100").rglob("*.py")))


SM90_TRAITS = (
    ShapeTrait("heads", 1, 128),
    ShapeTrait("query_tokens", 1, 8),
    ShapeTrait("page_tokens", 1, power_of_two=True),
)

SOLUTIONS = (
    KernelSpec(
        "mla",
        "decode",
        "reference",
        capabilities=(Capability("cpu"), Capability("cuda"), Capability("rocm")),
        signatures=(BF16, FP8, {operand: OperandFormat("float32") for operand in BF16}),
        load=_reference,
        priority=Priority.REFERENCE,
        objectives=frozenset(Objective),
        source=functools.partial(source_hash, _HERE / "reference.py"),
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
        unavailable=functools.partial(missing_package, "triton"),
        source=functools.partial(source_hash, _HERE / "triton_decode.py"),
    ),
    KernelSpec(
        "mla",
        "decode",
        "cuda_sm90",
        capabilities=(HOPPER,),
        signatures=(BF16,),
        load=_cuda_sm90,
        priority=Priority.SPECIALIZED,
        traits=SM90_TRAITS,
        unavailable=SOURCES.unavailable_reason,
        plan=_plan_sm90,
        workspace=_workspace_sm90,
        source=SOURCES.source_hash,
        prepare=SOURCES.built,
        serves_engine=True,
    ),
    KernelSpec(
        "mla",
        "decode",
        "cuda_sm90_fp8",
        capabilities=(HOPPER,),
        signatures=(FP8,),
        load=_cuda_sm90_fp8,
        priority=Priority.PORTABLE,  # not faster than FlashMLA everywhere: what was not measured stays with vLLM
        traits=SM90_TRAITS,
        unavailable=FP8_SOURCES.unavailable_reason,
        plan=_plan_sm90,
        workspace=_workspace_sm90_fp8,
        source=FP8_SOURCES.source_hash,
        prepare=_prepare_sm90_fp8,
        serves_engine=True,
    ),
    KernelSpec(
        "mla",
        "decode",
        "flashmla",
        capabilities=(HOPPER,),
        signatures=(BF16, FP8),
        load=left_to_vllm("FLASHMLA"),
        priority=Priority.PERFORMANT,
        traits=(ShapeTrait("page_tokens", allowed=frozenset({64})),),
        host_backend="FLASHMLA",
        unavailable=functools.partial(missing_package, "vllm"),
    ),
    KernelSpec(
        "mla",
        "decode",
        "flashattn3",
        capabilities=(HOPPER,),
        signatures=(BF16,),
        load=left_to_vllm("FLASH_ATTN_MLA"),
        priority=Priority.PERFORMANT,
        traits=(ShapeTrait("page_tokens", 16, power_of_two=True),),
        host_backend="FLASH_ATTN_MLA",
        unavailable=functools.partial(missing_package, "vllm"),
    ),
    KernelSpec(
        "mla",
        "decode",
        "cute_sm100",
        capabilities=(B200, B300),
        signatures=(BF16, FP8),
        load=_cute_sm100,
        priority=Priority.UNTRIED,
        traits=(
            ShapeTrait("heads", 1, 128),
            ShapeTrait("query_tokens", 1, 8),
            ShapeTrait("page_tokens", 16, power_of_two=True),
        ),
        objectives=frozenset({Objective.LATENCY, Objective.THROUGHPUT}),
        unavailable=_unavailable_sm100,
        plan=_plan_sm100,
        workspace=_workspace_sm100,
        source=_source_sm100,
        remark=_remark_sm100,
    ),
    KernelSpec(
        "mla",
        "decode",
        "tokenspeed_mla",
        capabilities=(BLACKWELL,),
        signatures=(FP8,),
        load=left_to_vllm("TOKENSPEED_MLA"),
        priority=Priority.PERFORMANT,
        traits=(ShapeTrait("query_tokens", 1, 8), ShapeTrait("page_tokens", allowed=frozenset({32, 64}))),
        host_backend="TOKENSPEED_MLA",
        unavailable=functools.partial(missing_package, "vllm", "tokenspeed_mla"),
    ),
    KernelSpec(
        "mla",
        "prefill",
        "reference",
        capabilities=(Capability("cpu"), Capability("cuda"), Capability("rocm")),
        signatures=(PREFILL_BF16, {operand: OperandFormat("float32") for operand in PREFILL_BF16}),
        load=_prefill_reference,
        priority=Priority.REFERENCE,
        objectives=frozenset(Objective),
        source=functools.partial(source_hash, _HERE / "prefill_reference.py"),
    ),
    KernelSpec(
        "mla",
        "prefill",
        "cute_sm100",
        capabilities=(B200, B300),
        signatures=(PREFILL_BF16,),
        load=_prefill_sm100,
        priority=Priority.UNTRIED,
        traits=(ShapeTrait("key_dims", allowed=frozenset({192})), ShapeTrait("value_dims", allowed=frozenset({128}))),
        objectives=frozenset({Objective.LATENCY, Objective.THROUGHPUT}),
        unavailable=_unavailable_sm100,
        source=_source_sm100,
        remark=lambda *_: "never run on hardware",
    ),
)

BENCHMARK_NAMES = {"ours": "cuda_sm90", "FlashMLA": "flashmla", "FlashAttention 3": "flashattn3"}
"""Solutions by the names that `benchmarks.mla` writes into its JSON."""
SETTING = " @"
"""Stands between such a name and a setting of it, where each of several was timed."""
FP8_BENCHMARK_NAMES = {"ours, FP8": "cuda_sm90_fp8", "FlashMLA, FP8": "flashmla"}
"""Those that read e4m3 caches."""


def decode_shape(heads: int, query_tokens: int, page_tokens: int, requests: int, context_tokens: int) -> dict[str, int]:
    """The shape numbers of MLA decode, by which it is filtered and tuned."""
    return {
        "heads": heads,
        "query_tokens": query_tokens,
        "page_tokens": page_tokens,
        "requests": requests,
        "context_tokens": context_tokens,
    }
