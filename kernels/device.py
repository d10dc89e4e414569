# SPDX-License-Identifier: Apache-2.0
"""This process's GPU as kernels and measurements see it."""

from __future__ import annotations

import ctypes

import torch

from tokenspeed_plugin.kernels.autotune import DeviceKey, sources_hash
from tokenspeed_plugin.kernels.registry import Platform, Registry


def this_platform() -> Platform:
    """The platform of this process's first GPU, or the CPU."""
    if not torch.cuda.is_available():
        return Platform("cpu")
    name, arch = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    return Platform("rocm" if torch.version.hip else "cuda", arch, name)


def driver_version() -> str:
    """The CUDA version that the installed driver serves, such as `13000`; `none` without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "none"
    version = ctypes.c_int()
    return str(version.value) if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else "none"


def device_key(gpu: str, registry: Registry) -> DeviceKey:
    """The key under which this machine's measurements on a GPU of that name are kept."""
    return DeviceKey(gpu, driver_version(), torch.__version__, sources_hash(list(registry)))
