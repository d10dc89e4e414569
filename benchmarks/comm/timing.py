# SPDX-License-Identifier: Apache-2.0
"""Times of the fused all-reduce and of what it replaces, each in a CUDA graph of its own, all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median

import torch
from torch import distributed

from benchmarks.comm.bars import FLOOR, NCCL, OURS, PLAIN, VLLM
from benchmarks.comm.checks import EPSILON, Inputs
from tokenspeed_plugin.kernels.comm.all_reduce_add_norm import AllReduceAddNorm
from tokenspeed_plugin.kernels.graph_timing import replay_us

GRAPH_CALLS = 32
REPLAYS = 21

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""`step(branch, residual, weight)`."""


class Stock:
    """vLLM's custom all-reduce and its fused norm, called as its engine calls them.

    Raises:
        RuntimeError: vLLM is not there, or its custom all-reduce does not work here; the message says why.
    """

    def __init__(self, group: distributed.ProcessGroup, device: torch.device) -> None:
        try:
            from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
        except Exception as error:
            raise RuntimeError(f"vLLM: {error}") from error
        self._reducer = CustomAllreduce(group, device)
        if self._reducer.disabled:
            raise RuntimeError("vLLM switched its custom all-reduce off here; its log says why")

    def capture(self) -> AbstractContextManager[object]:
        """What has to surround a capture."""
        context: AbstractContextManager[object] = self._reducer.capture()
        return context

    def __call__(self, branch: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> object:
        """One call; the residual is overwritten."""
        reduced = self._reducer.custom_all_reduce(branch)
        torch.ops._C.fused_add_rms_norm(reduced, residual, weight, EPSILON)
        return reduced


def steps(kernel: AllReduceAddNorm, plain: AllReduceAddNorm, stock: Stock | None) -> dict[str, Step]:
    """Implementations by name."""
    found: dict[str, Step] = {
        OURS: lambda x, r, w: kernel(x, r, w, EPSILON),
        PLAIN: lambda x, r, w: plain(x, r, w, EPSILON),
        FLOOR: lambda x, r, w: kernel.add_norm(x, r, w, EPSILON),
    }
    if stock is not None:
        found[VLLM] = stock
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
