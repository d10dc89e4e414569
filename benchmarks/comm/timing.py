# SPDX-License-Identifier: Apache-2.0
"""Times of the fused all-reduce and of what it replaces, each in a CUDA graph of its own, all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from statistics import median

import torch
from torch import distributed

from benchmarks.comm.bars import FLASHINFER, FLOOR, NCCL, OURS, PLAIN, VLLM
from benchmarks.comm.checks import EPSILON, Inputs
from benchmarks.comm.peers import FlashInferFused, Stock
from tokenspeed_plugin.kernels.comm.all_reduce_add_norm import AllReduceAddNorm
from tokenspeed_plugin.kernels.graph_timing import replay_us

GRAPH_CALLS = 32
REPLAYS = 21

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""`step(branch, residual, weight)`."""


def steps(
    kernel: AllReduceAddNorm, plain: AllReduceAddNorm, stock: Stock | None, flashinfer: FlashInferFused | None
) -> dict[str, Step]:
    """Implementations by name."""
    found: dict[str, Step] = {
        OURS: lambda x, r, w: kernel(x, r, w, EPSILON),
        PLAIN: lambda x, r, w: plain(x, r, w, EPSILON),
        FLOOR: lambda x, r, w: kernel.add_norm(x, r, w, EPSILON),
    }
    if stock is not None:
        found[VLLM] = stock
    if flashinfer is not None:
        found[FLASHINFER] = flashinfer
    found[NCCL] = lambda x, r, w: (distributed.all_reduce(x), kernel.add_norm(x, r, w, EPSILON))
    return found


def time_us(step: Step, inputs: Inputs, rows: int, stock: Stock | None) -> float:
    """Median time of one call, in microseconds; all ranks replay together."""
    operands = (inputs.branch[:rows].clone(), inputs.residual[:rows].clone(), inputs.weight)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            step(*operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    around = stock.capture() if stock is not None and step is stock else nullcontext()
    # NCCL's watchdog looks at events while this thread captures.
    with around, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(GRAPH_CALLS):
            step(*operands)
    return median(_replay_together_us(graph) / GRAPH_CALLS for _ in range(REPLAYS))


def _replay_together_us(graph: torch.cuda.CUDAGraph) -> float:
    distributed.barrier()
    torch.cuda.synchronize()
    return replay_us(graph)
