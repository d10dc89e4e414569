# SPDX-License-Identifier: Apache-2.0
"""The Hopper MLA library: its sources, and the built one."""

from __future__ import annotations

import functools
from pathlib import Path

from tokenspeed_plugin.kernels.mla.sm90.abi import MlaLibrary
from tokenspeed_plugin.kernels.nvcc import CudaSources

SOURCES = CudaSources("mla-sm90", Path(__file__).parent / "csrc")


@functools.cache
def load() -> MlaLibrary:
    """The library for these sources, built first if need be.

    Raises:
        LibraryUnavailableError: see `CudaSources.build`.
    """
    return MlaLibrary(str(SOURCES.built()))
