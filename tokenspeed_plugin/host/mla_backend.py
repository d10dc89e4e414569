# SPDX-License-Identifier: Apache-2.0
"""Puts our MLA backend into vLLM's `CUSTOM` slot, in every process of an engine that asked for `--kernels`.

A new name in vLLM's list of backends would not survive the way to the workers: they read the configuration before they load
plugins. The environment tells them to fill the slot.
"""

import os

VARIABLE = "TOKENSPEED_MLA_BACKEND"
SLOT = "CUSTOM"
PATH = "tokenspeed_plugin.kernels.engine.mla_backend.MlaBackend"


def install() -> None:
    """Fill the slot in this process and in those it starts."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, PATH)
    os.environ[VARIABLE] = PATH


def install_inherited() -> None:
    """Do in this process what the process that started the engine did."""
    if os.environ.get(VARIABLE):
        install()


def remove() -> None:
    """Empty the slot again if it holds our backend."""
    if os.environ.pop(VARIABLE, None) is not None:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        if occupant() == PATH:
            AttentionBackendEnum.CUSTOM.clear_override()


def occupant() -> str | None:
    """The class in the slot, None when it is empty."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum.CUSTOM.get_path() if AttentionBackendEnum.CUSTOM.is_overridden() else None
