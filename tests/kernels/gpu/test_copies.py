# SPDX-License-Identifier: Apache-2.0
"""Linear layer, sum over two ranks, residual add and norm in parts, with both ranks on one GPU, each on a stream of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tokenspeed_plugin.kernels.comm import library
from tokenspeed_plugin.kernels.comm.all_reduce_add_norm import AllReduceAddNorm, RowShape
from tokenspeed_plugin.kernels.comm.all_reduce_add_norm import memory_bytes as staging_bytes
from tokenspeed_plugin.kernels.comm.copies import CopyExchange, memory_bytes
from tokenspeed_plugin.kernels.comm.linear_operation import Linear, linear_all_reduce_add_norm
from tokenspeed_plugin.kernels.comm.operation import ReductionGroup, all_reduce_add_norm, register_group, remove_group
from tokenspeed_plugin.kernels.comm.overlap import Overlap
from tokenspeed_plugin.kernels.comm.peer_memory import PeerMemory
from tokenspeed_plugin.kernels.comm.reference import add_norm_reference

HIDDEN, INNER, MAX_ROWS, EPSILON, TIMEOUT_S = 1024, 512, 8192, 1e-5, 5.0
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def names() -> Iterator[list[str]]:
    """Groups of two ranks on one device; neither has another way to reduce."""
    comm = library.load()
    small, large = RowShape(HIDDEN, torch.bfloat16, 16), RowShape(HIDDEN, torch.bfloat16, MAX_ROWS)
    staging = tuple(comm.allocate(0, staging_bytes(comm, small, 2))[0] for _ in range(2))
    room = tuple(comm.allocate(0, memory_bytes(large))[0] for _ in range(2))
    found = []
    for rank in range(2):
        kernel = AllReduceAddNorm(comm, PeerMemory("one GPU", staging, lambda: None), rank, DEVICE, small, TIMEOUT_S)
        exchange = CopyExchange(comm, PeerMemory("one GPU", room, lambda: None), rank, DEVICE, large, TIMEOUT_S)
        found.append(f"one GPU {rank}")
        group = ReductionGroup(lambda _: pytest.fail("the step is left whole"), kernel, Overlap(exchange), exchange)
        register_group(found[-1], group)
    yield found
    torch.cuda.synchronize()
    for name in found:
        remove_group(name)
    for address in (*staging, *room):
        comm.free(0, address)


def test_both_ranks_get_the_sum_and_its_norm_call_after_call(names: list[str]) -> None:
    draw = torch.Generator(DEVICE).manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, generator=draw).bfloat16()

    weights, norm = random(2, HIDDEN, INNER), random(HIDDEN)
    steps = [(random(2, rows, INNER), random(rows, HIDDEN)) for rows in (8192, 2048, 3000, 8192, 4096, 2100) * 3]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in names]
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for rows, residual in steps:
        results = []
        for rank, (name, stream) in enumerate(zip(names, streams, strict=True)):
            with torch.cuda.stream(stream):
                linear = Linear(weights[rank], None)
                results.append(linear_all_reduce_add_norm(rows[rank], linear, residual, norm, EPSILON, 0.0, name))
        found.append(results)
    torch.cuda.synchronize()
    for (rows, residual), results in zip(steps, found, strict=True):
        products = [torch.nn.functional.linear(rows[rank], weights[rank]) for rank in range(2)]
        normed, total = add_norm_reference(products[0] + products[1], residual, norm, EPSILON)
        for own in results:
            # Parts of a product may be rounded elsewhere than the whole.
            torch.testing.assert_close(own[1], total, rtol=2e-2, atol=0.5)
            torch.testing.assert_close(own[0], normed, rtol=2e-2, atol=5e-2)
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


def test_sums_that_are_there_as_a_whole_go_by_the_same_copies(names: list[str]) -> None:
    draw = torch.Generator(DEVICE).manual_seed(4)
    steps = [
        (torch.randn(2, rows, HIDDEN, device=DEVICE, generator=draw).bfloat16(), torch.randn(rows, HIDDEN, device=DEVICE).bfloat16())
        for rows in (8192, 17, 300, 8192, 16, 4001) * 3
    ]  # fmt: skip
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in names]
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for terms, residual in steps:
        results = []
        for rank, (name, stream) in enumerate(zip(names, streams, strict=True)):
            with torch.cuda.stream(stream):
                results.append(all_reduce_add_norm(terms[rank], residual, None, EPSILON, 0.0, name))
        found.append(results)
    torch.cuda.synchronize()
    for (terms, residual), results in zip(steps, found, strict=True):
        normed, total = add_norm_reference(terms[0] + terms[1], residual, None, EPSILON)
        for own in results:
            assert torch.equal(own[1], total)
            torch.testing.assert_close(own[0], normed, rtol=2**-7, atol=1e-6)
