# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual add + RMS norm with all ranks on one GPU, each on a stream of its own: arithmetic and protocol.

What only several GPUs show (peer memory, NVLink, times) is in `python -m benchmarks.comm`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tokenspeed_plugin.kernels.comm import library
from tokenspeed_plugin.kernels.comm.all_reduce_add_norm import AllReduceAddNorm, RowShape, memory_bytes
from tokenspeed_plugin.kernels.comm.peer_memory import PeerMemory
from tokenspeed_plugin.kernels.comm.reference import add_norm_reference, all_reduce_add_norm_reference

NAN, EPSILON, TIMEOUT_S = float("nan"), 1e-5, 5.0
DEVICE = torch.device("cuda", 0)
# Every block of every rank must be resident at once: rows x ranks stays below the number of multiprocessors.
MAX_ROWS = 16
# The same where blocks have several rows each.
MANY_ROWS, MANY_BLOCKS = 8192, 64


@contextmanager
def ranks_of(
    count: int, hidden: int, dtype: torch.dtype = torch.bfloat16, max_rows: int = MAX_ROWS
) -> Iterator[list[AllReduceAddNorm]]:
    comm = library.load()
    shape = RowShape(hidden, dtype, max_rows)
    addresses = tuple(comm.allocate(0, memory_bytes(comm, shape, count))[0] for _ in range(count))
    memory = PeerMemory("one GPU", addresses, lambda: None)
    blocks = MANY_BLOCKS if max_rows > MAX_ROWS else 0
    yield [AllReduceAddNorm(comm, memory, rank, DEVICE, shape, TIMEOUT_S, most_blocks=blocks) for rank in range(count)]
    torch.cuda.synchronize()
    for address in addresses:
        comm.free(0, address)


class Call:
    """Operands and outputs of one call on all ranks; outputs are full of NaN."""

    def __init__(self, count: int, rows: int, hidden: int, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=DEVICE, generator=generator).to(dtype)

        self.branches, self.residual, self.weight = draw(count, rows, hidden), draw(rows, hidden), draw(hidden)
        self.out = torch.full((count, 2, rows, hidden), NAN, dtype=dtype, device=DEVICE)

    def launch(self, ranks: list[AllReduceAddNorm], streams: list[torch.cuda.Stream]) -> None:
        for rank, (kernel, stream) in enumerate(zip(ranks, streams, strict=True)):
            with torch.cuda.stream(stream):
                out = (self.out[rank, 0], self.out[rank, 1])
                kernel(self.branches[rank], self.residual, self.weight, EPSILON, out=out)

    def check(self) -> None:
        normed, total = all_reduce_add_norm_reference(list(self.branches), self.residual, self.weight, EPSILON)
        unit = 2 * torch.finfo(total.dtype).eps
        for own_normed, own_total in self.out:
            assert torch.equal(own_total, total)
            torch.testing.assert_close(own_normed, normed, rtol=unit, atol=1e-6)
            assert torch.equal(own_normed, self.out[0, 0])


def streams_for(count: int) -> list[torch.cuda.Stream]:
    torch.cuda.synchronize()
    return [torch.cuda.Stream() for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [8, 248, 2048, 4096, 7168, 16384])
@pytest.mark.parametrize("count", [2, 4, 6, 8])
def test_every_rank_gets_the_sum_and_its_norm(count: int, hidden: int, dtype: torch.dtype) -> None:
    with ranks_of(count, hidden, dtype) as ranks:
        calls = [Call(count, rows, hidden, dtype, seed) for seed, rows in enumerate((1, 2, 16, 1))]
        streams = streams_for(count)
        for call in calls:
            call.launch(ranks, streams)
        torch.cuda.synchronize()
        for call in calls:
            call.check()


def test_calls_with_changing_rows_and_late_ranks() -> None:
    draw = random.Random(3)
    with ranks_of(2, 4096) as ranks:
        calls = [Call(2, draw.choice((1, 1, 2, 5, 16)), 4096, torch.bfloat16, seed) for seed in range(200)]
        streams = streams_for(2)
        for call in calls:
            with torch.cuda.stream(draw.choice(streams)):
                torch.cuda._sleep(draw.randint(1, 50_000))
            call.launch(ranks, streams)
        torch.cuda.synchronize()
        for call in calls:
            call.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("hidden", "most"), [(8, 8192), (248, 8192), (2048, 8192), (4096, 8192), (7168, 1000), (8192, 600)]
)
def test_many_rows_between_calls_with_few(hidden: int, most: int, dtype: torch.dtype) -> None:
    with ranks_of(2, hidden, dtype, most) as ranks:
        rows = (most, 1, 129, most - 1, 16, most, 300, most, 2)
        calls = [Call(2, count, hidden, dtype, seed) for seed, count in enumerate(rows)]
        streams = streams_for(2)
        for call in calls:
            call.launch(ranks, streams)
        torch.cuda.synchronize()
        for call in calls:
            call.check()


def test_many_rows_without_residual_and_weight_and_with_late_ranks() -> None:
    draw = random.Random(5)
    with ranks_of(2, 1024, max_rows=MANY_ROWS) as ranks:
        streams = streams_for(2)
        for seed in range(40):
            call = Call(2, draw.choice((129, 1000, 2500)), 1024, torch.bfloat16, seed)
            torch.cuda.synchronize()
            with torch.cuda.stream(draw.choice(streams)):
                torch.cuda._sleep(draw.randint(1, 500_000))
            for rank, (kernel, stream) in enumerate(zip(ranks, streams, strict=True)):
                with torch.cuda.stream(stream):
                    out = (call.out[rank, 0], call.out[rank, 1])
                    kernel(call.branches[rank], None, None, EPSILON, 0.0, out)
            torch.cuda.synchronize()
            normed, total = all_reduce_add_norm_reference(list(call.branches), None, None, EPSILON)
            for own_normed, own_total in call.out:
                assert torch.equal(own_total, total)
                torch.testing.assert_close(own_normed, normed, rtol=2**-7, atol=1e-6)


def test_as_many_blocks_as_run_at_once_leave_room_for_one_more() -> None:
    multiprocessors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    with ranks_of(2, 4096, max_rows=MANY_ROWS // 2) as ranks:
        blocks = ranks[0]._library.blocks_at_once(0, ranks[0]._blocks[2])
        assert (blocks + 1) % multiprocessors == 0
        assert blocks >= multiprocessors - 1


def test_a_graph_of_both_ranks_goes_on_counting_when_it_is_replayed() -> None:
    with ranks_of(2, 2048, max_rows=MANY_ROWS) as ranks:
        calls = [Call(2, rows, 2048, torch.bfloat16, 50 + rows) for rows in (1, 7, 16, 300, 2, 1000)]
        first, second = streams_for(2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=first):
            second.wait_stream(first)
            for call in calls:
                call.launch(ranks, [first, second])
            first.wait_stream(second)
        for replay in range(50):
            for call in calls:
                call.branches.mul_(-1 if replay % 2 else 1)
                call.out.fill_(NAN)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            for call in calls:
                call.check()


@pytest.mark.parametrize("weight", ["none", "fp32", "gemma"])
def test_the_norm_alone_takes_any_number_of_rows_and_every_kind_of_weight(weight: str) -> None:
    with ranks_of(2, 4096) as ranks:
        call = Call(1, 1000, 4096, torch.bfloat16, 9)
        numbers = {"none": None, "fp32": call.weight.float() * 1.001, "gemma": call.weight}[weight]
        offset = 1.0 if weight == "gemma" else 0.0
        for residual in (call.residual, None):
            normed, total = ranks[0].add_norm(call.branches[0], residual, numbers, EPSILON, offset)
            expected = add_norm_reference(call.branches[0], residual, numbers, EPSILON, offset)
            torch.testing.assert_close(normed, expected[0], rtol=2**-7, atol=1e-6)
            assert torch.equal(total, expected[1])


def test_rows_of_a_wider_tensor_are_read_in_place() -> None:
    with ranks_of(2, 2048) as ranks:
        wide = torch.randn(5, 4096, device=DEVICE).bfloat16()
        normed, total = ranks[0].add_norm(wide[:, 2048:], wide[:, :2048], None, EPSILON)
        expected = add_norm_reference(wide[:, 2048:], wide[:, :2048], None, EPSILON)
        torch.testing.assert_close(normed, expected[0], rtol=2**-7, atol=1e-6)
        assert torch.equal(total, expected[1])


def test_what_the_kernel_does_not_take_is_refused_before_anything_is_launched() -> None:
    with ranks_of(2, 2048) as ranks:
        rows = torch.zeros(MAX_ROWS + 1, 2048, device=DEVICE, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="branch: 17 rows, allowed: 16"):
            ranks[0](rows, None, None, EPSILON)
        with pytest.raises(ValueError, match=r"residual: shape \(17, 2048\), allowed: \(1, 2048\)"):
            ranks[0](rows[:1], rows, None, EPSILON)
        with pytest.raises(ValueError, match=r"branch: torch\.float32 on cuda:0"):
            ranks[0](rows[:1].float(), None, None, EPSILON)
