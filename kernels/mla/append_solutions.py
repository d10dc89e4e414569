# SPDX-License-Identifier: Apache-2.0
"""The solutions of the append to the paged latent cache: RMS norm and rotation of new tokens, fused with their write.

All are called as `mla_append_reference` is. A solution that `serves_engine` can stand under vLLM's MLA layers: it changes only the
last dims of `q` and the slots it is given, reads no device value on the host, and takes no cache as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

APPEND_FAMILY, APPEND_MODE = "mla", "append"


def append_signature(dtype: str, cache_dtype: str) -> Signature:
    """Formats of the new tokens and of the cache that they are written to; an e4m3 cache has one scale."""
    scales = "tensor" if cache_dtype == "float8_e4m3fn" else "none"
    return {"new": OperandFormat(dtype), "kv": OperandFormat(cache_dtype, scales)}


def append_shape(latent_dims: int, rope_dims: int) -> dict[str, int]:
    """The shape numbers of the append, by which it is filtered."""
    return {"latent_dims": latent_dims, "rope_dims": rope_dims}


def _reference() -> Callable[..., Any]:
    from tokenspeed_plugin.kernels.mla.append_reference import mla_append_reference

    return mla_append_reference


def _triton() -> Callable[..., Any]:
    from tokenspeed_plugin.kernels.mla.triton_append import mla_append_triton

    return mla_append_triton


HOST_SOLUTION = "vllm"
"""vLLM's own layer: a norm, a rotation and a write, one after the other."""
_LAYER = "MultiHeadLatentAttentionWrapper"
_BF16, _FP8 = append_signature("bfloat16", "bfloat16"), append_signature("bfloat16", "float8_e4m3fn")

SOLUTIONS = (
    KernelSpec(
        APPEND_FAMILY,
        APPEND_MODE,
        "reference",
        # Padding makes it look at slots on the host, so no graph can hold it.
        capabilities=(Capability("cpu"),),
        signatures=(_BF16, _FP8, append_signature("float32", "float32")),
        load=_reference,
        priority=Priority.REFERENCE,
        objectives=frozenset(Objective),
        source=functools.partial(source_hash, Path(__file__).with_name("append_reference.py")),
        serves_engine=True,
    ),
    KernelSpec(
        APPEND_FAMILY,
        APPEND_MODE,
        "triton",
        # Triton has e4m3 from 8.9 on; gfx950 has the format that the cache has, gfx942 another.
        capabilities=(Capability("cuda", (8, 9)), Capability("rocm", (9, 5))),
        signatures=(_BF16, _FP8),
        load=_triton,
        priority=Priority.PORTABLE,
        traits=(
            ShapeTrait("latent_dims", 16, 4096, power_of_two=True),
            ShapeTrait("rope_dims", 2, 512, power_of_two=True),
        ),
        objectives=frozenset(Objective),  # a token's programs see nothing of the others
        unavailable=functools.partial(missing_package, "triton"),
        source=functools.partial(source_hash, Path(__file__).with_name("triton_append.py")),
        serves_engine=True,
    ),
    KernelSpec(
        APPEND_FAMILY,
        APPEND_MODE,
        HOST_SOLUTION,
        capabilities=(Capability("cuda"), Capability("rocm")),
        signatures=(_BF16, _FP8),
        load=left_to_vllm(_LAYER),
        priority=Priority.PERFORMANT,
        host_backend=_LAYER,
        unavailable=functools.partial(missing_package, "vllm"),
    ),
)
