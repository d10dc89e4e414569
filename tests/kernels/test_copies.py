# SPDX-License-Identifier: Apache-2.0
"""Terms by copies between two ranks: threads for ranks, host memory for that of GPUs, and streams that run at once."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenspeed_plugin.kernels.comm import copies, overlap
from tokenspeed_plugin.kernels.comm.abi import SentPart
from tokenspeed_plugin.kernels.comm.all_reduce_add_norm import RowShape
from tokenspeed_plugin.kernels.comm.copies import CopyExchange, connect_copies, memory_bytes
from tokenspeed_plugin.kernels.comm.limits import MAX_PARTS
from tokenspeed_plugin.kernels.comm.linear_operation import Linear, linear_all_reduce_add_norm
from tokenspeed_plugin.kernels.comm.operation import ReductionGroup, all_reduce_add_norm, register_group, remove_group
from tokenspeed_plugin.kernels.comm.overlap import Arriving, Overlap
from tokenspeed_plugin.kernels.comm.peer_memory import NotConnectedError, PeerMemory
from tokenspeed_plugin.kernels.comm.reference import add_norm_reference

SHAPE = RowShape(8, torch.bfloat16, 12)
EPSILON = 1e-5


class HostLibrary:
    """`send` and `wait` as the streams would run them; a rank dawdles before it sends and before it reads, so calls meet in many ways."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def event(self, device: int) -> int:
        return 0

    def send(self, device: int, part: SentPart) -> None:
        self._dawdle()
        ctypes.memmove(part.target, part.source, part.num_bytes)
        ctypes.c_uint32.from_address(part.flag).value = part.value

    def wait(self, device: int, flag: int, value: int, timeout_ns: int, stream: int, event: int) -> None:
        end = time.monotonic() + 20
        while (ctypes.c_uint32.from_address(flag).value - value) % 2**32 >= 2**31:
            assert time.monotonic() < end, "the peer did not come"
            time.sleep(1e-5)
        self._dawdle()

    def _dawdle(self) -> None:
        if float(torch.rand((), generator=self.generator)) < 0.25:
            time.sleep(3e-3)


@pytest.fixture
def host_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(cuda_stream=0)
    cuda = SimpleNamespace(Stream=lambda *_, **__: stream, current_stream=lambda _: stream)
    monkeypatch.setattr(copies.torch, "cuda", cuda)
    monkeypatch.setattr(copies, "_view", host_view)


def host_view(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).view(shape)


@pytest.fixture
def exchanges(host_streams: None) -> Iterator[list[CopyExchange]]:
    memories = [
        (ctypes.c_char * memory_bytes(SHAPE)).from_buffer(bytearray(b"\xff" * memory_bytes(SHAPE))) for _ in (0, 1)
    ]
    addresses = tuple(ctypes.addressof(memory) for memory in memories)
    peer = PeerMemory("host", addresses, lambda: None, memories)
    device: Any = SimpleNamespace(index=0)
    yield [CopyExchange(HostLibrary(rank), peer, rank, device, SHAPE) for rank in (0, 1)]  # type: ignore[arg-type]
    for rank in (0, 1):
        remove_group(f"copies {rank}")


def test_both_ranks_get_the_same_sums_call_after_call(exchanges: list[CopyExchange]) -> None:
    draw = torch.Generator().manual_seed(1)
    weights = torch.randn(2, 8, 4, generator=draw).bfloat16()
    steps = [torch.randn(2, rows, 4, generator=draw).bfloat16() for rows in (12, 2, 5, 12, 3, 8, 7, 2, 12, 4) * 3]
    residuals = [torch.randn(step.shape[1], 8, generator=draw).bfloat16() for step in steps]

    def one(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        torch.set_num_threads(1)
        name = f"copies {rank}"
        register_group(name, ReductionGroup(lambda _: pytest.fail("not in parts"), None, Overlap(exchanges[rank], 1)))
        linear = Linear(weights[rank], None)
        return [
            linear_all_reduce_add_norm(step[rank], linear, residual, None, EPSILON, 0.0, name)
            for step, residual in zip(steps, residuals, strict=True)
        ]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one, (0, 1))
    for step, residual, own, other in zip(steps, residuals, first, second, strict=True):
        summed = torch.nn.functional.linear(step[0], weights[0]) + torch.nn.functional.linear(step[1], weights[1])
        normed, total = add_norm_reference(summed, residual, None, EPSILON)
        for found in (own, other):
            assert torch.equal(found[1], total)
            assert torch.equal(found[0], normed)


class ReferenceKernel:
    """A kernel whose norm is the definition, and which takes no sum over ranks."""

    max_rows = 1

    def __init__(self, library: HostLibrary) -> None:
        self.library, self.parts = library, 0

    def takes(self, *_: object) -> bool:
        return True

    def __call__(self, *_: object, **__: object) -> None:
        pytest.fail("more rows than the kernel takes")

    def add_norm_of_parts(
        self, own: torch.Tensor, residual: torch.Tensor, *norm: Any, out: Any, arriving: Arriving
    ) -> None:
        for part in arriving.parts[: arriving.num_parts]:
            self.library.wait(0, part.flag, part.value, 0, 0, part.event or 0)
            rows = slice(part.first, part.end)
            values = add_norm_reference(own[rows] + arriving.rows[rows], residual[rows], *norm)
            for target, value in zip(out, values, strict=True):
                target[rows].copy_(value)
            self.parts += 1


def test_sums_that_are_there_as_a_whole_go_the_same_way(
    exchanges: list[CopyExchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "SUM_PART_BYTES", 64)  # parts of four rows
    kernels: list[ReferenceKernel] = []
    draw = torch.Generator().manual_seed(2)
    steps = [torch.randn(2, rows, 8, generator=draw).bfloat16() for rows in (12, 2, 5, 3, 12, 7) * 5]
    residuals = [torch.randn(step.shape[1], 8, generator=draw).bfloat16() for step in steps]

    def one(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        name, kernel = f"copies {rank}", ReferenceKernel(exchanges[rank].library)  # type: ignore[arg-type]
        kernels.append(kernel)
        group = ReductionGroup(lambda _: pytest.fail("by the group"), kernel, exchange=exchanges[rank])  # type: ignore[arg-type]
        register_group(name, group)
        return [
            all_reduce_add_norm(step[rank], residual, None, EPSILON, 0.0, name)
            for step, residual in zip(steps, residuals, strict=True)
        ]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one, (0, 1))
    for step, residual, own, other in zip(steps, residuals, first, second, strict=True):
        expected = add_norm_reference(step[0] + step[1], residual, None, EPSILON)
        for found in (own, other):
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [kernel.parts for kernel in kernels] == [sum(max(1, step.shape[1] // 4) for step in steps)] * 2


def test_a_large_sum_is_cut_where_its_norm_is_worth_a_launch() -> None:
    assert overlap.parts_of_sum(8192, 4096 * 2) == ((0, 4096), (4096, 8192))
    assert overlap.parts_of_sum(8192, 2048 * 2) == ((0, 8192),)
    assert len(overlap.parts_of_sum(1 << 20, 8192)) == MAX_PARTS


def test_larger_steps_than_there_is_room_for_are_left_whole(exchanges: list[CopyExchange]) -> None:
    cut = Overlap(exchanges[0], 1)
    assert len(cut.parts(12)) == MAX_PARTS
    assert cut.parts(13) == ((0, 13),)


def test_another_type_or_width_is_refused_before_anything_is_sent(exchanges: list[CopyExchange]) -> None:
    for product in (torch.zeros(2, 8), torch.zeros(2, 16).bfloat16()):
        with pytest.raises(ValueError, match=r"product: .*, allowed: torch.bfloat16 of 8"):
            exchanges[0].begin(product)


def test_more_than_two_ranks_are_refused() -> None:
    group: Any = SimpleNamespace(size=lambda: 4)
    with pytest.raises(NotConnectedError, match="4 ranks, allowed: 2"):
        connect_copies(group, torch.device("cpu"), SHAPE)


@pytest.mark.parametrize(
    ("rows", "part_rows", "parts"),
    [
        (2047, 1024, ((0, 2047),)),
        (2049, 1024, ((0, 1152), (1152, 2049))),
        (3072, 1024, ((0, 1024), (1024, 2048), (2048, 3072))),
        (5000, 1024, ((0, 1280), (1280, 2560), (2560, 3840), (3840, 5000))),
        (8192, 1024, ((0, 2048), (2048, 4096), (4096, 6144), (6144, 8192))),
        (12, 1, ((0, 3), (3, 6), (6, 9), (9, 12))),
        (3, 1, ((0, 1), (1, 2), (2, 3))),
        (1, 1, ((0, 1),)),
        (0, 1, ((0, 0),)),
    ],
)
def test_parts_cover_the_rows_and_end_where_tiles_end(
    rows: int, part_rows: int, parts: tuple[tuple[int, int], ...]
) -> None:
    exchange: Any = SimpleNamespace(max_rows=None)
    assert Overlap(exchange, part_rows).parts(rows) == parts
