# SPDX-License-Identifier: Apache-2.0
"""The Hopper MLA libraries, one for each element type of the cache: their sources, and the built ones."""

from __future__ import annotations

import functools
from pathlib import Path

from tokenspeed_plugin.kernels.mla.sm90.abi import MlaLibrary
from tokenspeed_plugin.kernels.nvcc import CudaSources

SOURCES = CudaSources("mla-sm90", Path(__file__).parent / "csrc")
FP8_SOURCES = CudaSources("mla-sm90-fp8", SOURCES.folder, ("TOKENSPEED_MLA_FP8",))


@functools.cache
def load() -> MlaLibrary:
    """The library for these sources, built first if need be.

    Raises:
        LibraryUnavailableError: see `CudaSources.build`.
    """
    return MlaLibrary(str(SOURCES.built()))


@functools.cache
def load_fp8() -> MlaLibrary:
    """The library for e4m3 queries and caches, built first if need be.

    Raises:
        LibraryUnavailableError: see `CudaSources.build`.
    """
    return MlaLibrary(str(FP8_SOURCES.built()))
