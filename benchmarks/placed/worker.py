# SPDX-License-Identifier: Apache-2.0
"""What the benchmark adds to vLLM's workers (``worker_extension_cls``): it is imported in each before the model is loaded."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

from benchmarks.gpu.engine import vary_dummy_weights

# Weights within 0.001 of zero would make every token check pass.
vary_dummy_weights()

KINDS = ("all_reduce", "all_gather", "reduce_scatter")


class Observed:
    """Counts the collectives of the tensor-parallel group, and times them alone."""

    def start_counting_collectives(self) -> None:
        """From now on every call of the tensor-parallel group is counted; only calls in eager mode are seen."""
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        self.counted_collectives: Counter[tuple[str, int]] = Counter()
        for kind in KINDS:
            setattr(group, kind, self._counting(kind, getattr(group, kind)))

    def _counting(self, kind: str, original: Any) -> Any:
        @functools.wraps(original)
        def count(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self.counted_collectives[kind, tensor.numel() * tensor.element_size()] += 1
            return original(tensor, *args, **kwargs)

        return count

    def take_counted_collectives(self) -> list[tuple[str, int, int]]:
        """Kind, bytes of the input and number of calls since the last time."""
        taken = [(kind, size, times) for (kind, size), times in sorted(self.counted_collectives.items())]
        self.counted_collectives.clear()
        return taken

    def time_collectives(self, sizes_bytes: tuple[int, ...]) -> dict[str, list[tuple[float, float]]]:
        """By kind: (ring-equivalent bytes, microseconds) for each size, the slowest rank's."""
        from vllm.distributed.parallel_state import get_tp_group

        from tokenspeed_plugin.placement.cost.measurement import measure

        group = get_tp_group()
        samples = measure(group.device_group, group.device, sizes_bytes)
        return {kind.value: [(s.ring_bytes, s.time_us) for s in found] for kind, found in samples.items()}
