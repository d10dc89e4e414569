# SPDX-License-Identifier: Apache-2.0
"""What `--kernels` means for the linear layers of an engine: whether those of few rows go to our kernel."""

from __future__ import annotations

from typing import Final

from tokenspeed_plugin.kernels.engine.named import named_for_layers, servable
from tokenspeed_plugin.kernels.engine.start import KernelsRefusedError
from tokenspeed_plugin.kernels.linear.limits import (
    IN_MULTIPLE,
    LEAST_WEIGHT_BYTES,
    MAX_ROWS,
    MEASURED_DEVICES,
    MOST_WEIGHT_BYTES,
    OUT_MULTIPLE,
)
from tokenspeed_plugin.kernels.linear.solutions import FAMILY, HOST_SOLUTION, MODE, shape, signature
from tokenspeed_plugin.kernels.nvcc import LibraryUnavailableError
from tokenspeed_plugin.kernels.registry import KernelSpec, Platform, default_registry
from tokenspeed_plugin.kernels.select import KernelRequest, KernelSelectionError, select_kernel

KEY: Final = FAMILY
_OWN: Final = "cuda_sm90"
_MIB: Final = 1 << 20


def allowed_linears() -> list[str]:
    """Solutions that an engine can be given by name, vLLM's own layers among them."""
    return servable(default_registry(), FAMILY, MODE)


def named_linear(text: str, asked_by: str) -> str | None:
    """The solution that a setting names, vLLM's own among them; None for `auto`, and when it names other operations only.

    Raises:
        ValueError: it names a solution that there is not, or one that cannot stand under vLLM's layers.
    """
    return named_for_layers(default_registry(), KEY, (FAMILY, MODE), text, asked_by)


def settle_linear(
    text: str, asked_by: str, platform: tuple[str, tuple[int, int], str], dtype: str, why_not: list[str]
) -> tuple[bool, str]:
    """Decide whether the linear layers of an engine go to a kernel of ours, and build it.

    Args:
        text: the setting, such as `auto` or `linear=cuda_sm90`.
        asked_by: how the user wrote it, for errors.
        platform: kind, architecture and product name of the GPU.
        dtype: of the model.
        why_not: what of the engine's configuration the kernel cannot serve, in the host's words.

    Returns:
        Whether they do, and a line for the log.

    Raises:
        KernelsRefusedError: the solution was named and cannot be had.
    """
    name, device = named_linear(text, asked_by), Platform(*platform)
    if name == HOST_SOLUTION:
        return False, f"{asked_by} {text}: linear layers stay with vLLM's own products"
    problem = "; ".join(why_not) or _unmeasured(name, device) or _problem(name or _OWN, device, dtype)
    if problem is None:
        size = f"{LEAST_WEIGHT_BYTES // _MIB} to {MOST_WEIGHT_BYTES // _MIB} MiB of weights"
        return True, f"{asked_by} {text}: linear layers with {size} take up to {MAX_ROWS} tokens by {name or _OWN}"
    if name is None:
        return False, f"{asked_by} {text}: linear layers stay with vLLM's own products: {problem}"
    allowed = ", ".join(allowed_linears())
    raise KernelsRefusedError(
        f"{asked_by} {text} cannot be honoured: {problem}. Allowed: off, auto, or {KEY}= one of {allowed}"
    )


def _unmeasured(name: str | None, device: Platform) -> str | None:
    """Why `auto` does not take the kernel on a GPU on which it would run."""
    if name is not None or device.kind != "cuda" or any(known in device.name for known in MEASURED_DEVICES):
        return None
    return f"{device.name} was not measured; {KEY}={_OWN} takes it all the same"


def _problem(name: str, device: Platform, dtype: str) -> str | None:
    """Why a solution cannot be had; it is built here, before the engine starts."""
    request = KernelRequest(FAMILY, MODE, signature(dtype), shape(1, OUT_MULTIPLE, IN_MULTIPLE), device)
    try:
        spec: KernelSpec = select_kernel(request, solution=name).spec
        spec.prepare()
    except KernelSelectionError as error:
        return str(error).removeprefix("argument solution asks for ")
    except LibraryUnavailableError as error:
        return f"{name} cannot be built: {error}"
    return None
