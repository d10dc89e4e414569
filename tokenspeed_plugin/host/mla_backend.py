# SPDX-License-Identifier: Apache-2.0
"""Puts one of our MLA backends into vLLM's `CUSTOM` slot, in every process of an engine that asked for `--kernels`.

A new name in vLLM's list of backends would not survive the way to the workers: they read the configuration before they load
plugins. The environment tells them to fill the slot.
"""

import os

VARIABLE = "TOKENSPEED_MLA_BACKEND"
SLOT = "CUSTOM"
PATH = "tokenspeed_plugin.kernels.engine.mla_backend.MlaBackend"
E4M3_PATH = "tokenspeed_plugin.kernels.engine.fp8_backend.Fp8MlaBackend"
OURS = (PATH, E4M3_PATH)
E4M3_CACHES = ("fp8", "fp8_e4m3")
"""vLLM's names of a cache of e4m3 values."""


def path_for(cache_dtype: str) -> str:
    """Our backend for a cache that vLLM calls `cache_dtype`."""
    return E4M3_PATH if cache_dtype in E4M3_CACHES else PATH


def install(path: str) -> None:
    """Fill the slot with one of our backends, in this process and in those it starts."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, path)
    os.environ[VARIABLE] = path


def install_inherited() -> None:
    """Do in this process what the process that started the engine did."""
    if (path := os.environ.get(VARIABLE)) in OURS:
        install(str(path))


def remove() -> None:
    """Empty the slot again if it holds a backend of ours."""
    if os.environ.pop(VARIABLE, None) is not None:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        if occupant() in OURS:
            AttentionBackendEnum.CUSTOM.clear_override()


def occupant() -> str | None:
    """The class in the slot, None when it is empty."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum.CUSTOM.get_path() if AttentionBackendEnum.CUSTOM.is_overridden() else None
