# SPDX-License-Identifier: Apache-2.0
"""Two GPUs that give each other their terms of a sum by copies, which take no multiprocessor from a matrix product.

An all-reduce of NCCL under a matrix product takes multiprocessors, and the blocks that would have run there come in a second wave,
so the two end no earlier than one after the other. The copy engines are idle meanwhile. For two ranks an exchange of whole terms
moves no more bytes than an all-reduce; the kernel of the norm adds them. The protocol is in `csrc/flags.cuh`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from tokenspeed_plugin.kernels.comm import library as comm
from tokenspeed_plugin.kernels.comm.abi import Arrival, SentPart
from tokenspeed_plugin.kernels.comm.all_reduce_add_norm import TIMEOUT_S, RowShape
from tokenspeed_plugin.kernels.comm.limits import MAX_PARTS
from tokenspeed_plugin.kernels.comm.overlap import Arriving, Terms, Transfer
from tokenspeed_plugin.kernels.comm.peer_memory import NotConnectedError, PeerMemory, share

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tokenspeed_plugin.kernels.comm.abi import CommLibrary

NUM_RANKS: Final = 2
NUM_BUFFERS: Final = 2
"""Calls that a rank has room for: a peer may be one call ahead."""
_FLAG_BYTES: Final = 128
"""Each flag has a line of its own."""
_ALIGNMENT: Final = 2 << 20
_WORDS: Final = {torch.bfloat16: "<i2", torch.float16: "<i2"}


class CopyExchange:
    """See `Exchange`. Its memory lives as long as the process.

    Memory of a rank: [buffer][row][hidden] of terms, then a flag for each part.
    """

    way = "copies between the GPUs"

    def __init__(
        self,
        library: CommLibrary,
        memory: PeerMemory,
        rank: int,
        device: torch.device,
        shape: RowShape,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`memory` has `memory_bytes(shape)` on each of two ranks; `shape.max_rows` are the rows of a call."""
        self.max_rows: int | None = shape.max_rows
        self.memory, self.device, self.library = memory, device, library
        self.own, self.peer = memory.addresses[rank], memory.addresses[1 - rank]
        self.row_bytes = shape.hidden * shape.dtype.itemsize
        self.buffer_bytes = shape.max_rows * self.row_bytes
        self.timeout_ns = int(timeout_s * 1e9)
        self.streams = tuple(torch.cuda.Stream(device, priority=-1) for _ in ("copies", "flags"))
        copies, flags = (stream.cuda_stream for stream in self.streams)
        self.dtype, self.hidden = shape.dtype, shape.hidden
        self._flags = NUM_BUFFERS * self.buffer_bytes
        # What does not change from call to call is written once: filling all of it anew took most of a call's time.
        events = [library.event(device.index) for _ in range(MAX_PARTS)]
        self.sent = [
            SentPart(flag=self._flag(self.peer, part), event=event, copies=copies, flags=flags)
            for part, event in enumerate(events)
        ]
        self.arrivals = (Arrival * MAX_PARTS)(
            *(Arrival(flag=self._flag(self.own, part), event=event) for part, event in enumerate(events))
        )
        self.received = [
            _view(self.own + index * self.buffer_bytes, (shape.max_rows, shape.hidden), shape.dtype, device)
            for index in range(NUM_BUFFERS)
        ]
        self._calls = 0

    def begin(self, product: torch.Tensor) -> Transfer:
        """See `Exchange`."""
        if product.dtype != self.dtype or product.shape[1] != self.hidden:
            raise ValueError(f"product: {product.dtype} of {product.shape[1]}, allowed: {self.dtype} of {self.hidden}")
        self._calls += 1
        return _CopyTransfer(self, product, self._calls)

    def _flag(self, base: int, part: int) -> int:
        """Address of a part's flag in the memory at `base`."""
        return base + self._flags + part * _FLAG_BYTES


class _CopyTransfer:
    def __init__(self, exchange: CopyExchange, product: torch.Tensor, call: int) -> None:
        self._exchange, self._product = exchange, product
        self._buffer, self._value = call % NUM_BUFFERS, call & 0xFFFF_FFFF
        self._stream = torch.cuda.current_stream(exchange.device).cuda_stream
        self._source = product.data_ptr()
        self._target = exchange.peer + self._buffer * exchange.buffer_bytes

    def start(self, part: int, first: int, end: int) -> None:
        exchange = self._exchange
        offset, sent = first * exchange.row_bytes, exchange.sent[part]
        sent.source, sent.target = self._source + offset, self._target + offset
        sent.num_bytes, sent.value, sent.producer = (end - first) * exchange.row_bytes, self._value, self._stream
        exchange.library.send(exchange.device.index, sent)

    def arriving(self, parts: tuple[tuple[int, int], ...]) -> Arriving:
        """See `Transfer`."""
        exchange = self._exchange
        for arrival, (first, end) in zip(exchange.arrivals, parts, strict=False):
            arrival.value, arrival.first, arrival.end = self._value, first, end
        return Arriving(exchange.received[self._buffer][: len(self._product)], exchange.arrivals, len(parts))

    def wait(self, part: int, first: int, end: int) -> Terms:
        # It waits for the own copy, too: what is sent must stay as it is until it has been sent.
        exchange = self._exchange
        flag, event = exchange.arrivals[part].flag, exchange.arrivals[part].event
        exchange.library.wait(exchange.device.index, flag, self._value, exchange.timeout_ns, self._stream, event)
        other = exchange.received[self._buffer]
        if end - first == len(self._product):
            return Terms(self._product, other[:end])
        return Terms(self._product[first:end], other[first:end])


def memory_bytes(shape: RowShape) -> int:
    """Bytes of peer memory that each rank needs."""
    num_bytes = NUM_BUFFERS * shape.max_rows * shape.hidden * shape.dtype.itemsize + MAX_PARTS * _FLAG_BYTES
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def connect_copies(group: ProcessGroup, device: torch.device, shape: RowShape) -> CopyExchange:
    """Share memory between the two ranks of a group of the CPU kind, which both have to call this; the library is built.

    Raises:
        NotConnectedError: there are not two ranks, or they cannot reach each other's memory.
    """
    if group.size() != NUM_RANKS:
        raise NotConnectedError(f"{group.size()} ranks, allowed: {NUM_RANKS}")
    library = comm.load()
    memory = share(group, library, device.index, memory_bytes(shape))
    return CopyExchange(library, memory, group.rank(), device, shape)


class _DeviceMemory:
    """Memory that torch did not allocate, as torch finds it."""

    def __init__(self, address: int, shape: tuple[int, ...], words: str) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape,
            "typestr": words,
            "data": (address, False),
            "version": 3,
        }


def _view(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    words: torch.Tensor = torch.as_tensor(_DeviceMemory(address, shape, _WORDS[dtype]), device=device)
    return words.view(dtype)
