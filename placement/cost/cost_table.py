# SPDX-License-Identifier: Apache-2.0
"""Numbers about one kind of machine: start-up time and bandwidth of each collective, memory and matrix speed."""

from __future__ import annotations

from importlib.resources import files
from itertools import pairwise
from math import log2
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from tokenspeed_plugin.placement.algebra import Conversion, PlacementError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

RING_FACTORS = {
    Conversion.ALL_REDUCE: 2.0,
    Conversion.REDUCE_SCATTER: 1.0,
    Conversion.ALL_GATHER: 1.0,
    Conversion.ALL_TO_ALL: 1.0,
}


class Sample(BaseModel):
    """One measured collective: ring-equivalent bytes and microseconds."""

    model_config = ConfigDict(frozen=True)

    ring_bytes: float = Field(ge=0)
    time_us: PositiveFloat


class LinkCost(BaseModel):
    """An estimate: ``time = latency_us + ring bytes / gbytes_per_s`` for one collective over one number of ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    latency_us: float = Field(ge=0)
    gbytes_per_s: PositiveFloat

    def time_us(self, ring_bytes: float) -> float:
        """Microseconds for ``ring_bytes`` sent by each rank."""
        return self.latency_us + ring_bytes / (self.gbytes_per_s * 1e3)


class LinkCurve(BaseModel):
    """A measured collective: what it took for some sizes, and between them the straight line on logarithmic scales.

    One latency and one bandwidth do not describe a measured link: libraries change the algorithm with the size. Less than the smallest size
    takes as long as that, more than the largest one goes at its bandwidth.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: tuple[Sample, ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _sizes_ascend(self) -> LinkCurve:
        sizes = [sample.ring_bytes for sample in self.samples]
        if sizes[0] <= 0 or any(small >= large for small, large in pairwise(sizes)):
            raise ValueError(f"sizes of a measured link must be positive and ascend, not {sizes}")
        return self

    def time_us(self, ring_bytes: float) -> float:
        """Microseconds for ``ring_bytes`` sent by each rank."""
        last = self.samples[-1]
        if ring_bytes > last.ring_bytes:
            return last.time_us * ring_bytes / last.ring_bytes
        sizes = np.log([sample.ring_bytes for sample in self.samples])
        times = np.log([sample.time_us for sample in self.samples])
        return float(np.exp(np.interp(np.log(max(ring_bytes, 1.0)), sizes, times)))


class CostTable(BaseModel):
    """One machine. ``links`` maps link name, collective and number of ranks to a cost; see :meth:`link`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str
    source: Literal["estimate", "measured"]
    note: str
    gpus_per_node: PositiveInt
    memory_bytes: PositiveInt
    memory_gbytes_per_s: PositiveFloat
    matrix_tflops: PositiveFloat
    kernel_launch_us: float = Field(ge=0)
    fused_all_reduce_max_bytes: dict[PositiveInt, PositiveInt]
    """Largest tensor, by number of ranks, for which an all-reduce and what follows it run as one kernel."""
    links: dict[Literal["node", "network"], dict[Conversion, dict[PositiveInt, LinkCost | LinkCurve]]]

    @classmethod
    def load(cls, path: Path | None = None) -> CostTable:
        """Read a table; the shipped H200 table without ``path``.

        Raises:
            pydantic.ValidationError: the file lacks or misnames a field.
        """
        text = path.read_text() if path else files(__package__).joinpath("h200.json").read_text()
        return cls.model_validate_json(text)

    def link(self, kind: Conversion, num_ranks: int, *, inside_node: bool) -> LinkCost | LinkCurve:
        """The cost for ``num_ranks``, or of the nearest size in the table on a logarithmic scale.

        Raises:
            PlacementError: the table has no such collective on that link.
        """
        name: Literal["node", "network"] = "node" if inside_node else "network"
        sizes = self.links.get(name, {}).get(kind)
        if not sizes:
            message = f"cost table of {self.device!r} has no {kind.value} on link {name!r}"
            raise PlacementError(message)
        return sizes[min(sizes, key=lambda n: abs(log2(n) - log2(num_ranks)))]


def ring_bytes(kind: Conversion, num_ranks: int, whole_bytes: float) -> float:
    """Bytes that one rank sends on a ring.

    ``whole_bytes`` is the tensor on one rank before an all-reduce, reduce-scatter or all-to-all, after an all-gather.
    All-reduce: ``2 (n - 1) / n`` times that, the others ``(n - 1) / n`` (Thakur, Rabenseifner, Gropp 2005).
    """
    return RING_FACTORS[kind] * (num_ranks - 1) / num_ranks * whole_bytes


def measured_link(samples: Sequence[Sample]) -> LinkCurve:
    """The curve through ``samples``.

    Raises:
        PlacementError: fewer than two message sizes, or time does not grow with size.
    """
    by_size = {sample.ring_bytes: sample for sample in samples}
    if len(by_size) < 2:
        message = f"{len(samples)} samples of one size say nothing about other sizes: measure two sizes or more"
        raise PlacementError(message)
    ascending = tuple(by_size[size] for size in sorted(by_size))
    if ascending[-1].time_us <= ascending[0].time_us:
        message = "time does not grow with the message size: the samples are not of one collective on one link"
        raise PlacementError(message)
    return LinkCurve(samples=ascending)
