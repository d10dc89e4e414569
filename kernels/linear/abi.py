# SPDX-License-Identifier: Apache-2.0
"""The C interface of the product of a few rows, field by field as in `csrc/params.cuh` and `csrc/api.cu`."""

from __future__ import annotations

import ctypes
from typing import Final

DEPENDENT_LAUNCH: Final = 1


class Params(ctypes.Structure):
    """Launch parameters; pointers are device addresses, strides count elements."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows_in", "weight", "bias", "rows_out")),
        *((name, ctypes.c_int64) for name in ("row_stride", "weight_stride")),
        *((name, ctypes.c_int32) for name in ("num_rows", "in_values", "out_values", "launch_flags")),
    ]


class LinearError(RuntimeError):
    """CUDA refused a launch, or an operand is not what the kernel takes; the message says what."""


class LinearLibrary:
    """A loaded library whose parameter block has the size this file describes.

    Raises:
        RuntimeError: the library was built from other sources than this file goes with.
    """

    def __init__(self, path: str) -> None:
        self._library = library = ctypes.CDLL(path)
        block = ctypes.POINTER(Params)
        library.tokenspeed_linear_error.restype = ctypes.c_char_p
        library.tokenspeed_linear_prepare.argtypes = [ctypes.c_int]
        library.tokenspeed_linear_few_rows.argtypes = [ctypes.c_int, block, ctypes.c_void_p]
        built, described = library.tokenspeed_linear_params_bytes(), ctypes.sizeof(Params)
        if built != described:
            raise RuntimeError(f"{path}: Params has {built} bytes there and {described} here; rebuild the library")

    def prepare(self, device: int) -> None:
        """Load the kernels: doing it in a launch could wait for one that waits for a peer."""
        self._check(self._library.tokenspeed_linear_prepare(device))

    def few_rows(self, device: int, params: Params, stream: int) -> None:
        """Launch the kernel on a CUDA stream."""
        self._check(self._library.tokenspeed_linear_few_rows(device, ctypes.byref(params), stream))

    def _check(self, status: int) -> None:
        if status != 0:
            raise LinearError(self._library.tokenspeed_linear_error().decode())
