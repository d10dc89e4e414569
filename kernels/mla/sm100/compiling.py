# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels for a given architecture, on any machine: no GPU and no driver is needed.

The compiled functions take device addresses, strides and numbers. `decode_values`, `plan_values` and `merge_values` put
them into order, for compilation (where addresses and numbers do not matter) as for a launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cuda.bindings import driver
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_ptr

from tokenspeed_plugin.kernels.mla.sm100.kernel import DecodeKernel
from tokenspeed_plugin.kernels.mla.sm100.merging import MergeKernel
from tokenspeed_plugin.kernels.mla.sm100.operands import DecodeVariant
from tokenspeed_plugin.kernels.mla.sm100.output import partial_element
from tokenspeed_plugin.kernels.mla.sm100.planning import PlanKernel
from tokenspeed_plugin.kernels.mla.sm100.prefill.block import PrefillVariant
from tokenspeed_plugin.kernels.mla.sm100.prefill.kernel import PrefillKernel

BLACKWELL = "sm_100a"
DECODE = (
    *("q_nope", "q_rope", "kv_cache", "out", "lse", "block_table", "seq_lens", "query_starts", "plan"),
    *("partial_out", "partial_lse", "q_nope_strides", "q_rope_strides", "kv_strides", "out_strides", "table_stride"),
    *("num_tokens", "num_requests", "num_pages", "page_shift", "groups", "scale_log2", "output_scale"),
)
PLAN = ("seq_lens", "block_table", "plan", "table_stride", "num_requests", "page_shift", "groups")
MERGE = (
    *("out", "lse", "query_starts", "plan", "partial_out", "partial_lse", "out_strides"),
    *("num_tokens", "num_requests", "groups", "output_scale"),
)
PREFILL = (
    *("q", "k", "v", "out", "lse", "query_starts", "kv_starts", "q_strides", "k_strides", "v_strides", "out_strides"),
    *("num_tokens", "num_kv_tokens", "num_heads", "num_requests", "num_query_tiles", "scale_log2"),
)
"""Parameters of the kernels, in order; a stream comes last."""
ALIGNMENT_BYTES = {"q_nope": 16, "q_rope": 16, "kv_cache": 16, "partial_out": 16, "q": 16, "k": 16, "v": 16}
"""Alignment that a kernel relies on; 4 for all other addresses."""


def arguments(
    names: tuple[str, ...], variant: DecodeVariant | None, values: Mapping[str, Any], stream: int
) -> list[Any]:
    """Addresses, strides and numbers as the compiled functions take them.

    Args:
        names: parameters of the kernel, in order.
        variant: of the decode kernel; None where no parameter depends on it.
        values: by name; what is missing is 0.
        stream: handle of a CUDA stream.
    """
    return [*(_argument(name, variant, values.get(name)) for name in names), driver.CUstream(stream)]


def _argument(name: str, variant: DecodeVariant | None, value: Any) -> Any:
    if name.endswith("_strides"):
        first, second = value or (0, 0)
        return (Int64(first), Int64(second))
    if name == "table_stride":
        return Int64(value or 0)
    if name in {"scale_log2", "output_scale"}:
        return Float32(value or 0.0)
    if name.startswith("num_") or name in {"page_shift", "groups"}:
        return Int32(value or 0)
    # The prefill kernel writes rows of its output 16 bytes at a time; the decode kernel element by element.
    align = (16 if variant is None else 2) if name == "out" else ALIGNMENT_BYTES.get(name, 4)
    return make_ptr(_pointee(name, variant), value or 0, cute.AddressSpace.gmem, assumed_align=align)


def _pointee(name: str, variant: DecodeVariant | None) -> Any:
    if name in {"lse", "partial_lse"}:
        return Float32
    if name in {"out", "q", "k", "v"}:
        return BFloat16
    if variant is not None and name in {"q_nope", "q_rope", "kv_cache"}:
        return variant.element
    return partial_element(variant.layout.rows) if variant is not None and name == "partial_out" else Int32


def compile_decode(variant: DecodeVariant, options: str = "", arch: str = BLACKWELL) -> Any:
    """Compile the decode kernel; parameters: `DECODE`.

    Raises:
        LayoutError: the variant's layout does not fit.
    """
    return _compile(DecodeKernel(variant), arguments(DECODE, variant, {}, 0), options, arch)


def compile_plan(options: str = "", arch: str = BLACKWELL) -> Any:
    """Compile the plan kernel, for Blackwell or for another architecture; parameters: `PLAN`."""
    return _compile(PlanKernel(), arguments(PLAN, None, {}, 0), options, arch)


def compile_merge(variant: DecodeVariant, options: str = "", arch: str = BLACKWELL) -> Any:
    """Compile the merge kernel that goes with a decode kernel; parameters: `MERGE`."""
    kernel = MergeKernel(variant.num_heads, variant.max_query_tokens, variant.tiles)
    return _compile(kernel, arguments(MERGE, variant, {}, 0), options, arch)


def compile_prefill(variant: PrefillVariant, options: str = "", arch: str = BLACKWELL) -> Any:
    """Compile the prefill kernel; parameters: `PREFILL`.

    Raises:
        LayoutError: the variant's layout does not fit.
    """
    return _compile(PrefillKernel(variant), arguments(PREFILL, None, {}, 0), options, arch)


def _compile(kernel: Any, values: list[Any], options: str, arch: str) -> Any:
    return cute.compile(kernel, *values, options=f"--gpu-arch {arch} {options}")
