# SPDX-License-Identifier: Apache-2.0
"""The library of the product of a few rows for Hopper: its sources, and the built one."""

from __future__ import annotations

import functools
from pathlib import Path

from tokenspeed_plugin.kernels.linear.abi import LinearLibrary
from tokenspeed_plugin.kernels.nvcc import STATUS, CudaSources

SOURCES = CudaSources("linear-sm90", Path(__file__).parent / "csrc", borrowed=(STATUS,))


@functools.cache
def load() -> LinearLibrary:
    """The library for these sources, built first if need be.

    Raises:
        LibraryUnavailableError: see `CudaSources.build`.
    """
    return LinearLibrary(str(SOURCES.built()))
