# SPDX-License-Identifier: Apache-2.0
"""The C interface of the Hopper MLA library, field by field as in `csrc/geometry.cuh` and `csrc/api.cu`."""

from __future__ import annotations

import ctypes

_POINTERS = (
    "q_nope",
    "q_rope",
    "kv_cache",
    "out",
    "lse",
    "block_table",
    "seq_lens",
    "query_starts",
    "plan",
    "partial_out",
    "partial_lse",
    "counters",
    "query_scale",
    "kv_scale",
)
_STRIDES = (
    "q_nope_token_stride",
    "q_nope_head_stride",
    "q_rope_token_stride",
    "q_rope_head_stride",
    "kv_page_stride",
    "kv_token_stride",
    "out_token_stride",
    "out_head_stride",
    "block_table_stride",
)
_COUNTS = (
    "num_requests",
    "num_tokens",
    "num_heads",
    "max_query_tokens",
    "num_pages",
    "page_shift",
    "rows",
    "tile_heads",
    "tile_query_tokens",
    "head_tiles",
    "token_tiles",
    "groups",
    "launch_flags",
)


DEPENDENT_LAUNCH = 1
COOPERATIVE_LAUNCH = 2


class DecodeParams(ctypes.Structure):
    """Launch parameters; pointers are device addresses, strides count elements."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_int32) for name in _COUNTS),
        ("softmax_scale", ctypes.c_float),
    ]


class PlanParams(ctypes.Structure):
    """What the plan kernel reads and writes."""

    _fields_ = [
        ("seq_lens", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("plan", ctypes.c_void_p),
        ("block_table_stride", ctypes.c_int64),
        ("num_requests", ctypes.c_int32),
        ("groups", ctypes.c_int32),
        ("page_shift", ctypes.c_int32),
    ]


class MlaLibrary:
    """A loaded library whose parameter block has the size this file describes.

    Raises:
        RuntimeError: the library was built from other sources than this file goes with.
    """

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._library.tokenspeed_mla_error.restype = ctypes.c_char_p
        self._library.tokenspeed_mla_plan.argtypes = [ctypes.POINTER(PlanParams), ctypes.c_void_p]
        self._library.tokenspeed_mla_decode.argtypes = [ctypes.POINTER(DecodeParams), ctypes.c_void_p]
        built, described = self._library.tokenspeed_mla_params_bytes(), ctypes.sizeof(DecodeParams)
        if built != described:
            raise RuntimeError(
                f"{path}: DecodeParams has {built} bytes there and {described} here; rebuild the library"
            )

    def plan(self, params: PlanParams, stream: int) -> None:
        """Launch the plan kernel on a CUDA stream."""
        self._check(self._library.tokenspeed_mla_plan(ctypes.byref(params), stream))

    def decode(self, params: DecodeParams, stream: int) -> None:
        """Launch the decode kernel on a CUDA stream."""
        self._check(self._library.tokenspeed_mla_decode(ctypes.byref(params), stream))

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"MLA decode on sm_90: {self._library.tokenspeed_mla_error().decode()}")
