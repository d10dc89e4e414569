# SPDX-License-Identifier: Apache-2.0
"""Puts placed models into vLLM's registry in place of its own, in every process of an engine that asked for `--placement`.

A placed class builds vLLM's own model when the configuration that it gets does not ask for placement (a draft model, another
engine in the same process). The environment tells engine-core and worker processes which architectures to replace.
"""

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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


@contextmanager
def whole_on_every_rank(suffixes: tuple[str, ...]) -> Iterator[None]:
    """While vLLM builds a model: linear layers of a decoder layer with these suffixes are not split over the ranks.

    The switch (`disable_tp`) is vLLM's, but the model classes do not hand it on, so the constructors are wrapped meanwhile.
    """
    if not suffixes:
        yield
        return
    from tokenspeed_plugin.host.model_names import MergedColumnParallelLinear, RowParallelLinear

    named = re.compile(r"(?:^|\.)layers\.\d+\.(?:" + "|".join(map(re.escape, suffixes)) + ")$")
    originals = {cls: cls.__init__ for cls in (MergedColumnParallelLinear, RowParallelLinear)}
    for cls, original in originals.items():
        cls.__init__ = _whole(original, named)
    try:
        yield
    finally:
        for cls, original in originals.items():
            cls.__init__ = original


def _whole(original: Callable[..., None], named: re.Pattern[str]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if named.search(str(kwargs.get("prefix", ""))):
            kwargs["disable_tp"] = True
        original(self, *args, **kwargs)

    return __init__


def _class_name(architecture: str) -> str:
    # vLLM caches what it finds out about a class under this name, beyond a change of its version.
    return f"{architecture}{_MARK}{str(installed_version()).replace('.', '_').replace('+', '_')}"
