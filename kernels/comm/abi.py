# SPDX-License-Identifier: Apache-2.0
"""The C interface of the collective kernels, field by field as in `csrc/params.cuh` and `csrc/api.cu`."""

from __future__ import annotations

import ctypes
from typing import Final

MAX_RANKS: Final = 8
HANDLE_BYTES: Final = 64
DEPENDENT_LAUNCH: Final = 1
BFLOAT16, FLOAT16, FLOAT32 = 0, 1, 2

_COUNTS = ("rank", "num_ranks", "rows", "hidden", "max_rows", "element_type", "weight_type", "launch_flags")


class Params(ctypes.Structure):
    """Launch parameters; pointers are device addresses, strides count elements."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("branch", "other", "residual", "weight", "normed", "total")),
        ("staging", ctypes.c_void_p * MAX_RANKS),
        ("last_slots", ctypes.c_void_p),
        ("timeout_ns", ctypes.c_uint64),
        ("branch_stride", ctypes.c_int64),
        ("residual_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in (*_COUNTS, "most_blocks")),
        ("epsilon", ctypes.c_float),
        ("weight_offset", ctypes.c_float),
    ]


class SentPart(ctypes.Structure):
    """A copy to a peer: where from and to, the peer's flag and what is written there, the event that marks its end, and streams.

    `producer` makes the source; `copies` and `flags` are for nothing else.
    """

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("source", "target", "flag", "event", "producer", "copies", "flags")),
        ("num_bytes", ctypes.c_int64),
        ("value", ctypes.c_uint32),
    ]


class Arrival(ctypes.Structure):
    """A part, rows `first` to `end`, that has come when this rank's `flag` has `value` or a later one; `event`: the own copy's end."""

    _fields_ = [
        ("flag", ctypes.c_void_p),
        ("event", ctypes.c_void_p),
        ("value", ctypes.c_uint32),
        ("first", ctypes.c_int32),
        ("end", ctypes.c_int32),
    ]


class CommError(RuntimeError):
    """CUDA refused something; the message says what, and in which call."""


class CommLibrary:
    """A loaded library whose parameter block has the size this file describes.

    Raises:
        RuntimeError: the library was built from other sources than this file goes with.
    """

    def __init__(self, path: str) -> None:
        self._library = library = ctypes.CDLL(path)
        device, address, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
        out, block = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(Params)
        library.tokenspeed_comm_error.restype = ctypes.c_char_p
        library.tokenspeed_comm_staging_bytes.restype = size
        library.tokenspeed_comm_staging_bytes.argtypes = [ctypes.c_int] * 3
        library.tokenspeed_comm_allocate.argtypes = [device, size, out, ctypes.c_char_p]
        library.tokenspeed_comm_free.argtypes = [device, address]
        library.tokenspeed_comm_open.argtypes = [device, ctypes.c_char_p, out]
        library.tokenspeed_comm_close.argtypes = [device, address]
        library.tokenspeed_comm_clear.argtypes = [device, address, size]
        library.tokenspeed_comm_probe.argtypes = [device, block, ctypes.c_uint64]
        library.tokenspeed_comm_read_probe.argtypes = [device, block, ctypes.POINTER(ctypes.c_uint64)]
        library.tokenspeed_comm_prepare.argtypes = [device, block]
        library.tokenspeed_comm_blocks_at_once.argtypes = [device, block, ctypes.POINTER(ctypes.c_int32)]
        library.tokenspeed_comm_all_reduce_add_norm.argtypes = [device, block, ctypes.c_void_p]
        library.tokenspeed_comm_event.argtypes = [device, out]
        library.tokenspeed_comm_send.argtypes = [device, ctypes.POINTER(SentPart)]
        parts = ctypes.POINTER(Arrival)
        library.tokenspeed_comm_add_norm_of_parts.argtypes = [device, block, parts, ctypes.c_int, address]
        library.tokenspeed_comm_await.argtypes = [device, address, ctypes.c_uint32, ctypes.c_uint64, address, address]
        built, described = library.tokenspeed_comm_params_bytes(), ctypes.sizeof(Params)
        if built != described:
            raise RuntimeError(f"{path}: Params has {built} bytes there and {described} here; rebuild the library")

    def staging_bytes(self, num_ranks: int, max_rows: int, hidden: int) -> int:
        """Bytes of staging memory that one rank needs."""
        return int(self._library.tokenspeed_comm_staging_bytes(num_ranks, max_rows, hidden))

    def allocate(self, device: int, num_bytes: int) -> tuple[int, bytes]:
        """Blank memory on a device, and the handle by which another process opens it."""
        address, handle = ctypes.c_void_p(), ctypes.create_string_buffer(HANDLE_BYTES)
        self._check(self._library.tokenspeed_comm_allocate(device, num_bytes, ctypes.byref(address), handle))
        return address.value or 0, handle.raw

    def free(self, device: int, address: int) -> None:
        """Give back what `allocate` returned."""
        self._check(self._library.tokenspeed_comm_free(device, address))

    def open(self, device: int, handle: bytes) -> int:
        """The address at which a device sees another process's memory."""
        address = ctypes.c_void_p()
        self._check(self._library.tokenspeed_comm_open(device, handle, ctypes.byref(address)))
        return address.value or 0

    def close(self, device: int, address: int) -> None:
        """Undo `open`."""
        self._check(self._library.tokenspeed_comm_close(device, address))

    def clear(self, device: int, address: int, num_bytes: int) -> None:
        """Make memory blank, as it is before the first call, and wait for it."""
        self._check(self._library.tokenspeed_comm_clear(device, address, num_bytes))

    def probe(self, device: int, params: Params, base: int) -> None:
        """Write `base` + own rank to every peer and wait for it."""
        self._check(self._library.tokenspeed_comm_probe(device, ctypes.byref(params), base))

    def read_probe(self, device: int, params: Params) -> tuple[int, ...]:
        """Two words for each rank: what its probe wrote here, and the complement."""
        words = (ctypes.c_uint64 * (2 * params.num_ranks))()
        self._check(self._library.tokenspeed_comm_read_probe(device, ctypes.byref(params), words))
        return tuple(words)

    def prepare(self, device: int, params: Params) -> None:
        """Load the kernels that launches with such parameters use."""
        self._check(self._library.tokenspeed_comm_prepare(device, ctypes.byref(params)))

    def blocks_at_once(self, device: int, params: Params) -> int:
        """Blocks of a launch with many rows that run at once, with room left for a small kernel of another stream."""
        blocks = ctypes.c_int32()
        self._check(self._library.tokenspeed_comm_blocks_at_once(device, ctypes.byref(params), ctypes.byref(blocks)))
        return blocks.value

    def all_reduce_add_norm(self, device: int, params: Params, stream: int) -> None:
        """Launch the kernel on a CUDA stream."""
        self._check(self._library.tokenspeed_comm_all_reduce_add_norm(device, ctypes.byref(params), stream))

    def event(self, device: int) -> int:
        """A mark in a stream, for `send`."""
        event = ctypes.c_void_p()
        self._check(self._library.tokenspeed_comm_event(device, ctypes.byref(event)))
        return event.value or 0

    def send(self, device: int, part: SentPart) -> None:
        """Copy to a peer's memory what the producer has made, then write the peer's flag; no multiprocessor copies."""
        self._check(self._library.tokenspeed_comm_send(device, ctypes.byref(part)))

    def add_norm_of_parts(
        self, device: int, whole: Params, parts: ctypes.Array[Arrival], num_parts: int, stream: int
    ) -> None:
        """For each part make a stream wait for it, as `wait` does, and launch the kernel of one rank on its rows of `whole`."""
        add_norm = self._library.tokenspeed_comm_add_norm_of_parts
        self._check(add_norm(device, ctypes.byref(whole), parts, num_parts, stream))

    def wait(self, device: int, flag: int, value: int, timeout_ns: int, stream: int, event: int) -> None:
        """Make a stream wait for an event, and until a peer has written `value` or a later one to this rank's flag."""
        self._check(self._library.tokenspeed_comm_await(device, flag, value, timeout_ns, stream, event))

    def _check(self, status: int) -> None:
        if status != 0:
            raise CommError(self._library.tokenspeed_comm_error().decode())
