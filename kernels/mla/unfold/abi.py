# SPDX-License-Identifier: Apache-2.0
"""The C interface of the kernel that makes keys and values, field by field as in `csrc/params.cuh` and `csrc/api.cu`."""

from __future__ import annotations

import ctypes


class Params(ctypes.Structure):
    """Launch parameters; pointers are device addresses, strides count elements."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("kv_cache", "weights", "rows", "block_table", "tiles")),
        *(
            (name, ctypes.c_int64)
            for name in ("page_stride", "token_stride", "row_stride", "row_token_stride", "table_stride")
        ),
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_heads", "num_pages", "num_tiles", "page_shift")),
        *((name, ctypes.c_int32) for name in ("clusters", "write_rope")),
    ]


class UnfoldError(RuntimeError):
    """CUDA refused a launch, or a number is not what the kernel takes; the message says what."""


class UnfoldLibrary:
    """A loaded library whose parameter block has the size this file describes.

    Raises:
        RuntimeError: the library was built from other sources than this file goes with.
    """

    def __init__(self, path: str) -> None:
        self._library = library = ctypes.CDLL(path)
        library.tokenspeed_unfold_error.restype = ctypes.c_char_p
        library.tokenspeed_unfold_prepare.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
        library.tokenspeed_unfold_run.argtypes = [ctypes.c_int, ctypes.POINTER(Params), ctypes.c_void_p]
        built, described = library.tokenspeed_unfold_params_bytes(), ctypes.sizeof(Params)
        if built != described:
            raise RuntimeError(f"{path}: Params has {built} bytes there and {described} here; rebuild the library")

    def prepare(self, device: int) -> int:
        """Load the kernel; how many of its clusters of two blocks run on the device at once."""
        clusters = ctypes.c_int()
        self._check(self._library.tokenspeed_unfold_prepare(device, ctypes.byref(clusters)))
        return clusters.value

    def run(self, device: int, params: Params, stream: int) -> None:
        """Launch the kernel on a CUDA stream."""
        self._check(self._library.tokenspeed_unfold_run(device, ctypes.byref(params), stream))

    def _check(self, status: int) -> None:
        if status != 0:
            raise UnfoldError(self._library.tokenspeed_unfold_error().decode())
