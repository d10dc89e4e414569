# SPDX-License-Identifier: Apache-2.0
"""The library of collective kernels for Hopper: its sources, and the built one."""

from __future__ import annotations

import functools
from pathlib import Path

from tokenspeed_plugin.kernels.comm.abi import CommLibrary
from tokenspeed_plugin.kernels.nvcc import STATUS, CudaSources

SOURCES = CudaSources("comm-sm90", Path(__file__).parent / "csrc", borrowed=(STATUS,))


@functools.cache
def load() -> CommLibrary:
    """The library for these sources, built first if need be.

    Raises:
        LibraryUnavailableError: see `CudaSources.build`.
    """
    return CommLibrary(str(SOURCES.built()))
