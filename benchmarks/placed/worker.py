# SPDX-License-Identifier: Apache-2.0
"""What the benchmark adds to vLLM's workers (``worker_extension_cls``): it is imported in each before the model is loaded."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

from benchmarks.gpu.engine import vary_dummy_weights
from benchmarks.gpu.whole_graphs import WholeGraphs
from benchmarks.placed.traces import TracedSteps

# Weights within 0.001 of zero would make every token check pass.
vary_dummy_weights()

KINDS = ("all_reduce", "all_gather", "reduce_scatter")


class Observed(WholeGraphs, TracedSteps):
    """Counts the collectives of the tensor-parallel group, times them alone, times the whole graphs that decode steps replay, and traces steps."""

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
        """By kind: (ring-equivalent bytes, microseconds) for each size, the slowest rank's.

        On GPUs calls of vLLM's own group in a captured graph, which is what a step runs; on CPUs those of its process group.
        """
        from vllm.distributed.parallel_state import get_tp_group

        from tokenspeed_plugin.placement.cost.measurement import measure

        group = get_tp_group()
        chosen = {} if group.device.type == "cpu" else {"operations": _operations(_checked(group)), "call_us": _call_us}
        samples = measure(group.device_group, group.device, sizes_bytes, **chosen)
        return {kind.value: [(s.ring_bytes, s.time_us) for s in found] for kind, found in samples.items()}

    def collective_changes(self) -> dict[str, list[float]]:
        """By kind: ring-equivalent bytes from which on vLLM is known to run another algorithm."""
        from vllm.distributed.parallel_state import get_tp_group

        from tokenspeed_plugin.placement.algebra import Conversion
        from tokenspeed_plugin.placement.cost.cost_table import ring_bytes

        group = get_tp_group()
        one_shot = getattr(group.device_communicator, "ca_comm", None)
        if one_shot is None or one_shot.disabled:
            return {}
        kind = Conversion.ALL_REDUCE
        return {kind.value: [ring_bytes(kind, group.world_size, one_shot.max_size)]}


def _checked(group: Any) -> Any:
    """What plans talk through on this machine: a collective that does not work is another one there."""
    import torch

    from tokenspeed_plugin.placement.algebra import Conversion
    from tokenspeed_plugin.placement.runtime.collective_check import check_kinds
    from tokenspeed_plugin.placement.runtime.vllm_communicator import GroupCommunicator

    communicator = GroupCommunicator(group, ())
    check_kinds(communicator, group, set(Conversion), torch.bfloat16)
    return communicator


def _operations(communicator: Any) -> dict[Any, Any]:
    """Out of place, as a model calls them."""
    from tokenspeed_plugin.placement.algebra import Conversion

    return {
        Conversion.ALL_REDUCE: lambda whole, _: communicator.all_reduce(whole, (), "sum"),
        Conversion.REDUCE_SCATTER: lambda whole, _: communicator.reduce_scatter(whole, (), 0, "sum"),
        Conversion.ALL_GATHER: lambda _, own: communicator.all_gather(own, (), 0),
    }


def _call_us(run: Any) -> float:
    """Microseconds of a call in a captured graph; vLLM exchanges the addresses of captured buffers when it leaves the capture."""
    import torch
    from vllm.distributed.parallel_state import get_tp_group, graph_capture

    from tokenspeed_plugin.kernels.graph_timing import GRAPH_CALLS, call_us

    group = get_tp_group()
    with graph_capture(group.device) as capture:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=capture.stream):
            for _ in range(GRAPH_CALLS):
                run()
    group.barrier()
    return call_us(graph)
