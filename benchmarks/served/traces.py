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

    `us` is from a kernel's start to its end. Kernels may start before those before them have ended, or after a gap: `added_us` is
    from the end of all kernels before it to its own end, so that those of all kernels sum up to the time of the graph.

    Raises:
        RuntimeError: the trace has no kernel.
    """
    calls: Counter[str] = Counter()
    total_us: Counter[str] = Counter()
    added_us: Counter[str] = Counter()
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in events if e.device_type.name == "CUDA")
    if not spans:
        raise RuntimeError("the profiler saw no kernel")
    latest = spans[0][0]
    for start, end, name in spans:
        calls[name] += 1
        total_us[name] += end - start
        added_us[name] += max(0, end - latest)
        latest = max(latest, end)
    counts = {"calls": calls, "us": total_us, "added_us": added_us}
    ranked = sorted(total_us, key=lambda name: -total_us[name])
    return [{"name": name, **{key: found[name] / num_replays for key, found in counts.items()}} for name in ranked]
