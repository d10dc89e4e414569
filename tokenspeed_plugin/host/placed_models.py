# SPDX-License-Identifier: Apache-2.0
"""Puts placed models into vLLM's registry in place of its own, in every process of an engine that asked for `--placement`.

A placed class builds vLLM's own model when the configuration that it gets does not ask for placement (a draft model, another
engine in the same process). The environment tells engine-core and worker processes which architectures to replace.
"""

import os
from collections.abc import Iterable
from typing import Any

from tokenspeed_plugin.host.version import installed_version

VARIABLE = "TOKENSPEED_PLACED_MODELS"
_MODULE = "tokenspeed_plugin.placement.runtime.placed_models"
_MARK = "__on_vllm_"

_stock: dict[str, Any] = {}


def install(architectures: Iterable[str]) -> tuple[str, ...]:
    """Replace the registered classes of `architectures`; those that vLLM does not have are left out and not returned."""
    from tokenspeed_plugin.host.model_names import ModelRegistry

    installed = []
    for name in architectures:
        current = ModelRegistry.models.get(name)
        if current is None:
            continue
        if getattr(current, "module_name", None) != _MODULE:
            _stock[name] = current
            ModelRegistry.register_model(name, f"{_MODULE}:{_class_name(name)}")
        installed.append(name)
    os.environ[VARIABLE] = ",".join(installed)
    return tuple(installed)


def install_inherited() -> None:
    """Do in this process what the process that started the engine did."""
    if names := os.environ.get(VARIABLE):
        install(names.split(","))


def remove() -> None:
    """Put vLLM's own classes back."""
    os.environ.pop(VARIABLE, None)
    if _stock:
        from tokenspeed_plugin.host.model_names import ModelRegistry

        ModelRegistry.models.update(_stock)
        _stock.clear()


def stock_class(architecture: str) -> Any:
    """vLLM's own class, or that of another distribution, whether it is replaced at present or not."""
    from tokenspeed_plugin.host.model_names import ModelRegistry

    return (_stock.get(architecture) or ModelRegistry.models[architecture]).load_model_cls()


def architecture_of(class_name: str) -> str | None:
    """The architecture of a class that `install` registered; None for other names."""
    name, mark, _ = class_name.partition(_MARK)
    return name if mark else None


def _class_name(architecture: str) -> str:
    # vLLM caches what it finds out about a class under this name, beyond a change of its version.
    return f"{architecture}{_MARK}{str(installed_version()).replace('.', '_').replace('+', '_')}"
