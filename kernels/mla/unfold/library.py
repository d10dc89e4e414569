# SPDX-License-Identifier: Apache-2.0
"""The library of the kernel that makes keys and values of paged latents: its sources, and the built one."""

from __future__ import annotations

import functools
from pathlib import Path

from tokenspeed_plugin.kernels.mla.sm90.library import SOURCES as DECODE
from tokenspeed_plugin.kernels.mla.unfold.abi import UnfoldLibrary
from tokenspeed_plugin.kernels.nvcc import STATUS, CudaSources

SOURCES = CudaSources("mla-unfold-sm90", Path(__file__).parent / "csrc", borrowed=(DECODE.folder / "ptx.cuh", STATUS))


@functools.cache
def load() -> UnfoldLibrary:
    """The library for these sources, built first if need be.

    Raises:
        LibraryUnavailableError: see `CudaSources.build`.
    """
    return UnfoldLibrary(str(SOURCES.built()))
