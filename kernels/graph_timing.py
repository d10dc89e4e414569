# SPDX-License-Identifier: Apache-2.0
"""Device time of one call, by replays of a CUDA graph of many calls."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

GRAPH_CALLS = 20
_WARM_CALLS = 3


def time_us(call: Callable[[int], None], replays: int = 9, settle_us: float = 0.0) -> float:
    """Median over `replays` of a graph of GRAPH_CALLS calls, in microseconds per call.

    Args:
        call: `call(i)` launches the i-th.
        replays: how often the graph is timed.
        settle_us: device time for which it runs before. What keeps the whole GPU busy is faster or slower by what ran
            before it, so implementations that are compared are each timed behind themselves.
    """
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for i in range(_WARM_CALLS):
            call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(GRAPH_CALLS):
            call(i)
    ran_us = 0.0
    while ran_us < settle_us:
        ran_us += replay_us(graph)
    return call_us(graph, replays)


def call_us(graph: torch.cuda.CUDAGraph, replays: int = 9) -> float:
    """Median over `replays` of a captured graph of GRAPH_CALLS calls, in microseconds per call."""
    graph.replay()
    return float(statistics.median(replay_us(graph) / GRAPH_CALLS for _ in range(replays)))


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Device time of one replay, in microseconds."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3
