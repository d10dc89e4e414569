# SPDX-License-Identifier: Apache-2.0
"""Measures the collectives of a process group and turns the times into a cost table that is the same on every rank."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Final, TypeAlias

from tokenspeed_plugin.placement.algebra import COLLECTIVES, Conversion
from tokenspeed_plugin.placement.cost.cost_table import (
    CostTable,
    LinkCost,
    LinkCurve,
    Sample,
    measured_link,
    ring_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch.distributed import ProcessGroup

Operation: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], object]"
"""A collective of the whole tensor, and of this rank's part of it; each operation uses the one it takes."""
SIZES_BYTES: Final = tuple(2**exponent for exponent in range(12, 28, 3))
PASSES: Final = 3
"""All sizes are measured that often, one after the other: what disturbs one call of one size does not reach the median."""
REPEATS: Final = 20
WARM_UPS: Final = 5
_REST: Final = "Everything else: "


def measure(
    group: ProcessGroup,
    device: torch.device,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    *,
    operations: Mapping[Conversion, Operation] | None = None,
    call_us: Callable[[Callable[[], object]], float] | None = None,
) -> dict[Conversion, list[Sample]]:
    """Median time of every collective and whole-tensor size (bf16), the slowest rank's.

    Every rank of ``group`` has to call this; all get the same samples. ``operations`` are the collectives to be measured,
    by default those of ``torch.distributed``; ``call_us`` times one call in microseconds, by default on the host, from a
    launch on an idle device to the end of the work.
    """
    chosen = operations or _operations(group)
    timed = call_us or (lambda run: _host_us(run, group, device))
    found = {}
    for kind in sorted(chosen, key=lambda k: k.value):
        passes = [
            [_sample(kind, group, device, size, chosen[kind], timed) for size in sizes_bytes] for _ in range(PASSES)
        ]
        found[kind] = [
            Sample(ring_bytes=same_size[0].ring_bytes, time_us=median(s.time_us for s in same_size))
            for same_size in zip(*passes, strict=True)
        ]
    return found


def measured_table(
    base: CostTable,
    num_ranks: int,
    samples: Mapping[Conversion, Sequence[Sample]],
    changes_at: Mapping[Conversion, Sequence[float]],
) -> CostTable:
    """``base`` with the links inside a node as they were measured over ``num_ranks`` ranks.

    ``changes_at`` has the ring-equivalent bytes from which on a collective is known to run another algorithm.

    Raises:
        PlacementError: the samples of a collective make no curve.
    """
    node: dict[Conversion, dict[int, LinkCost | LinkCurve]] = {
        kind: dict(sizes) for kind, sizes in base.links["node"].items()
    }
    for kind, measured in samples.items():
        node.setdefault(kind, {})[num_ranks] = measured_link(measured, changes_at.get(kind, ()))
    kinds, rest = ", ".join(kind.value for kind in samples), base.note.rpartition(_REST)[2]
    changes = {
        "source": "measured",
        "note": f"{kinds} over {num_ranks} ranks inside a node are measured. {_REST}{rest}",
        "links": {**base.links, "node": node},
    }
    return base.model_copy(update=changes)


def prediction_errors(
    samples: Mapping[Conversion, Sequence[Sample]], changes_at: Mapping[Conversion, Sequence[float]]
) -> dict[Conversion, list[tuple[float, float]]]:
    """By collective: ring-equivalent bytes, and predicted over measured time minus one, of every size between two others.

    Each size is predicted from a table without it: through its own sample a curve passes exactly, which says nothing.
    """
    return {
        kind: [
            (
                left_out.ring_bytes,
                measured_link([*measured[:index], *measured[index + 1 :]], changes_at.get(kind, ())).time_us(
                    left_out.ring_bytes
                )
                / left_out.time_us
                - 1,
            )
            for index, left_out in enumerate(measured[1:-1], start=1)
        ]
        for kind, measured in samples.items()
    }


def _sample(
    kind: Conversion,
    group: ProcessGroup,
    device: torch.device,
    size_bytes: int,
    operation: Operation,
    call_us: Callable[[Callable[[], object]], float],
) -> Sample:
    import torch
    from torch import distributed

    num_ranks = group.size()
    elements = max(size_bytes // 2 // num_ranks, 1) * num_ranks
    whole = torch.zeros(elements, dtype=torch.bfloat16, device=device)
    own = torch.zeros(elements // num_ranks, dtype=torch.bfloat16, device=device)
    time_us = call_us(lambda: operation(whole, own))
    slowest = torch.tensor([time_us], dtype=torch.float64, device=device)
    distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX, group=group)
    return Sample(ring_bytes=ring_bytes(kind, num_ranks, elements * 2), time_us=slowest.item())


def _host_us(run: Callable[[], object], group: ProcessGroup, device: torch.device) -> float:
    for _ in range(WARM_UPS):
        run()
    times = []
    for _ in range(REPEATS):
        _settle(device, group)
        start = perf_counter()
        run()
        _settle(device)
        times.append((perf_counter() - start) * 1e6)
    return median(times)


def _operations(group: ProcessGroup) -> dict[Conversion, Operation]:
    import torch
    from torch import distributed

    found: dict[Conversion, Operation] = {
        Conversion.ALL_REDUCE: lambda whole, _: distributed.all_reduce(whole, group=group),
        Conversion.REDUCE_SCATTER: lambda whole, own: distributed.reduce_scatter_tensor(own, whole, group=group),
        Conversion.ALL_GATHER: lambda whole, own: distributed.all_gather_into_tensor(whole, own, group=group),
        Conversion.ALL_TO_ALL: lambda whole, _: distributed.all_to_all_single(
            torch.empty_like(whole), whole, group=group
        ),
    }
    return {kind: found[kind] for kind in COLLECTIVES}


def _settle(device: torch.device, group: ProcessGroup | None = None) -> None:
    """Wait for the device, and for the other ranks."""
    import torch
    from torch import distributed

    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    if group is not None:
        distributed.barrier(group=group)
