# SPDX-License-Identifier: Apache-2.0
"""What `--kernels append=NAME` means for an engine: which solution writes the new tokens of MLA layers, and whether it can.

Nothing of ours was measured faster than what vLLM compiles, so `auto` chooses none.
"""

from __future__ import annotations

from typing import Any, Final

from tokenspeed_plugin.kernels.device import this_platform
from tokenspeed_plugin.kernels.engine.named import named_for_layers, servable
from tokenspeed_plugin.kernels.engine.start import KernelsRefusedError
from tokenspeed_plugin.kernels.mla.append_solutions import (
    APPEND_FAMILY,
    APPEND_MODE,
    HOST_SOLUTION,
    append_shape,
    append_signature,
)
from tokenspeed_plugin.kernels.mla.geometry import LATENT_DIMS, ROPE_DIMS
from tokenspeed_plugin.kernels.registry import KernelSpec, Platform, default_registry
from tokenspeed_plugin.kernels.select import KernelRequest, KernelSelectionError, select_kernel
from tokenspeed_plugin.settings import resolve_in_process

KEY = "append"
OPERATION: Final = "tokenspeed::mla_append"
"""The operation as graphs name it."""
E4M3 = "float8_e4m3fn"


def allowed_appends() -> list[str]:
    """Solutions that an engine can be given by name, vLLM's own layer among them."""
    return servable(default_registry(), APPEND_FAMILY, APPEND_MODE)


def named_append(text: str, asked_by: str) -> str | None:
    """The solution of ours that a setting names; None for `auto`, for vLLM's own, and when it names other operations only.

    Raises:
        ValueError: it names a solution that there is not, or one that cannot stand under vLLM's layers.
    """
    name = named_for_layers(default_registry(), KEY, (APPEND_FAMILY, APPEND_MODE), text, asked_by)
    return None if name == HOST_SOLUTION else name


def cache_type(dtype: str, cache_dtype: str) -> str:
    """Element type of a cache that vLLM calls `cache_dtype`, of a model of type `dtype`; the name itself where it is no plain cache."""
    return {"auto": dtype, "fp8": E4M3, "fp8_e4m3": E4M3}.get(cache_dtype, cache_dtype)


def settle_append(
    text: str,
    asked_by: str,
    platform: tuple[str, tuple[int, int], str],
    dtype: str,
    cache_dtype: str,
    why_not: list[str],
) -> str:
    """Decide whether the named solution can append for an engine; returns a line for the log.

    Args:
        text: the setting, such as `append=triton`.
        asked_by: how the user wrote it, for errors.
        platform: kind, architecture and product name of the GPU.
        dtype: of the model.
        cache_dtype: vLLM's name of the cache's type.
        why_not: what of the engine's configuration our layer cannot serve, in the host's words.

    Raises:
        KernelsRefusedError: the solution cannot be had.
    """
    name = named_append(text, asked_by)
    found = "; ".join(why_not) or _fitting(str(name), Platform(*platform), dtype, cache_dtype, LATENT_DIMS, ROPE_DIMS)
    if isinstance(found, KernelSpec):
        return (
            f"{asked_by} {text}: new tokens of MLA layers are written by {name}, normed and rotated in the same launch"
        )
    allowed = ", ".join(allowed_appends())
    raise KernelsRefusedError(
        f"{asked_by} {text} cannot be honoured: {found}. Allowed: off, auto, or {KEY}= one of {allowed}"
    )


def layer_solution(
    vllm_config: Any, dtype: str, cache_dtype: str, latent_dims: int, rope_dims: int
) -> KernelSpec | str | None:
    """The solution for one layer in a worker, why it cannot append there, or None when the engine did not ask."""
    resolved = resolve_in_process(vllm_config.additional_config)
    name = named_append(resolved.values.kernels, resolved.source("kernels").spelling("kernels"))
    if name is None:
        return None
    return _fitting(name, this_platform(), dtype, cache_dtype, latent_dims, rope_dims)


def _fitting(
    name: str, platform: Platform, dtype: str, cache_dtype: str, latent_dims: int, rope_dims: int
) -> KernelSpec | str:
    formats = append_signature(dtype, cache_type(dtype, cache_dtype))
    request = KernelRequest(APPEND_FAMILY, APPEND_MODE, formats, append_shape(latent_dims, rope_dims), platform)
    try:
        return select_kernel(request, solution=name).spec
    except KernelSelectionError as error:
        return str(error).removeprefix("argument solution asks for ")
