# SPDX-License-Identifier: Apache-2.0
"""Solutions that `--kernels` may name for an engine, whatever the operation: ours that serve engines, and vLLM's own."""

from __future__ import annotations

from tokenspeed_plugin.kernels.registry import Registry
from tokenspeed_plugin.kernels.select import parse_overrides


def servable(registry: Registry, family: str, mode: str) -> list[str]:
    """Names of the solutions of an operation that an engine can be given."""
    specs = registry.candidates(family, mode)
    return sorted(spec.solution for spec in specs if spec.serves_engine or spec.host_backend is not None)


def named_for_layers(registry: Registry, key: str, operation: tuple[str, str], text: str, asked_by: str) -> str | None:
    """The solution that a setting names for an operation of vLLM's layers; None for `auto`, and when it names others only.

    Args:
        registry: of the solutions.
        key: what the setting calls the operation.
        operation: family and mode.
        text: the setting, such as `append=triton`.
        asked_by: how the user wrote it, for errors.

    Raises:
        ValueError: it names a solution that there is not, or one that cannot stand under vLLM's layers.
    """
    name, known = parse_overrides(text, registry, asked_by).by_family.get(key), servable(registry, *operation)
    if name is not None and name not in known:
        raise ValueError(f"{asked_by} {text}: {name!r} cannot serve vLLM's layers, allowed: {', '.join(known)}")
    return name
