# SPDX-License-Identifier: Apache-2.0
"""Numbers about one kind of machine: start-up time and bandwidth of each collective, memory and matrix speed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from importlib.resources import files
from itertools import pairwise
from math import exp, log, log2
from typing import TYPE_CHECKING, Literal

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

    One latency and one bandwidth do not describe a measured link: libraries change the algorithm with the size. Where they are
    known to (``changes_at``), time jumps, and a line ends there: it goes on as it went between its last two sizes. Less than the
    smallest size takes as long as that, more than the largest one goes at its bandwidth.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: tuple[Sample, ...] = Field(min_length=2)
    changes_at: tuple[float, ...] = ()
    """Ring-equivalent bytes from which on another algorithm runs, ascending."""

    @model_validator(mode="after")
    def _sizes_ascend(self) -> LinkCurve:
        sizes = [sample.ring_bytes for sample in self.samples]
        if sizes[0] <= 0 or any(small >= large for small, large in pairwise(sizes)):
            raise ValueError(f"sizes of a measured link must be positive and ascend, not {sizes}")
        if any(len(self._samples_of(index)) < 2 for index in range(len(self.changes_at) + 1)):
            message = f"each algorithm of a link needs two measured sizes: {sizes} with changes at {self.changes_at}"
            raise ValueError(message)
        return self

    def time_us(self, ring_bytes: float) -> float:
        """Microseconds for ``ring_bytes`` sent by each rank."""
        first, last = self.samples[0], self.samples[-1]
        if ring_bytes > last.ring_bytes:
            return last.time_us * ring_bytes / last.ring_bytes
        own = self._samples_of(bisect_right(self.changes_at, ring_bytes))
        sizes, times = ([log(getattr(s, field)) for s in own] for field in ("ring_bytes", "time_us"))
        wanted = log(max(ring_bytes, first.ring_bytes))
        upper = min(max(bisect_right(sizes, wanted), 1), len(sizes) - 1)
        slope = (times[upper] - times[upper - 1]) / (sizes[upper] - sizes[upper - 1])
        return exp(times[upper - 1] + slope * (wanted - sizes[upper - 1]))

    def _samples_of(self, algorithm: int) -> list[Sample]:
        return [s for s in self.samples if bisect_right(self.changes_at, s.ring_bytes) == algorithm]


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


def measured_link(samples: Sequence[Sample], changes_at: Sequence[float] = ()) -> LinkCurve:
    """The curve through ``samples``; another algorithm runs from each of ``changes_at`` ring-equivalent bytes on.

    A change without two samples on each side of it is left out: that much is needed to see it.

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
    return LinkCurve(samples=ascending, changes_at=_seen(sorted(changes_at), [s.ring_bytes for s in ascending]))


def _seen(changes_at: Sequence[float], sizes: Sequence[float]) -> tuple[float, ...]:
    seen: list[float] = []
    for change in changes_at:
        below = bisect_left(sizes, change) - (bisect_left(sizes, seen[-1]) if seen else 0)
        if below >= 2 and len(sizes) - bisect_left(sizes, change) >= 2:
            seen.append(change)
    return tuple(seen)
