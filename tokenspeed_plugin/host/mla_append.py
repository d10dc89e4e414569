# SPDX-License-Identifier: Apache-2.0
"""Puts our MLA layer in the place of vLLM's, in every process of an engine that asked for `--kernels append=NAME`.

vLLM looks for a replacement by the name of its class whenever it makes such a layer. The environment tells the workers to
register it; the layer itself looks whether the engine that builds it asked.
"""

import importlib
import os
from typing import Any

VARIABLE = "TOKENSPEED_MLA_APPEND"
REPLACED = "MultiHeadLatentAttentionWrapper"
_MODULE, _CLASS = "tokenspeed_plugin.kernels.engine.append_layer", "AppendingLatentAttention"


def install() -> None:
    """Register the layer in this process and in those it starts."""
    from vllm.model_executor.custom_op import PluggableLayer

    if occupant() is None:
        PluggableLayer.register_oot(getattr(importlib.import_module(_MODULE), _CLASS), name=REPLACED)
    os.environ[VARIABLE] = _CLASS


def install_inherited() -> None:
    """Do in this process what the process that started the engine did."""
    if os.environ.get(VARIABLE):
        install()


def remove() -> None:
    """Take the layer out again if it is registered."""
    if os.environ.pop(VARIABLE, None) is not None and is_ours(occupant()):
        from vllm.model_executor.custom_op import op_registry_oot

        del op_registry_oot[REPLACED]


def occupant() -> Any:
    """The class that replaces vLLM's layer, None when none does."""
    from vllm.model_executor.custom_op import op_registry_oot

    return op_registry_oot.get(REPLACED)


def is_ours(layer: Any) -> bool:
    """Whether a class is our layer."""
    return getattr(layer, "__module__", None) == _MODULE
