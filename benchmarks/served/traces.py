# SPDX-License-Identifier: Apache-2.0
"""The kernels of a CUDA graph, as PyTorch's profiler sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any


def traced_kernels(graph: Any, num_replays: int) -> list[dict[str, Any]]:
    """See `kernel_times`; nothing else may run on the GPU meanwhile."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_replays):
            graph.replay()
        torch.cuda.synchronize()
    return kernel_times(profiler.events(), num_replays)


def kernel_times(events: Iterable[Any], num_replays: int) -> list[dict[str, Any]]:
    """Launches and microseconds of each kernel in one replay, the longest first.

    Raises:
        RuntimeError: the trace has no kernel.
    """
    calls: Counter[str] = Counter()
    total_us: Counter[str] = Counter()
    for event in events:
        if event.device_type.name == "CUDA":
            calls[event.name] += 1
            total_us[event.name] += event.time_range.elapsed_us()
    if not calls:
        raise RuntimeError("the profiler saw no kernel")
    ranked = sorted(total_us, key=lambda name: -total_us[name])
    return [{"name": name, "calls": calls[name] / num_replays, "us": total_us[name] / num_replays} for name in ranked]
