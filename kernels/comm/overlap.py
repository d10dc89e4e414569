# SPDX-License-Identifier: Apache-2.0
"""A linear layer in parts of its rows, each part's sum over ranks under the matrix product of the next one."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch
from torch import distributed

from tokenspeed_plugin.kernels.comm.limits import MAX_PARTS, PART_ROWS, SUM_PART_BYTES, num_parts
from tokenspeed_plugin.kernels.comm.peer_memory import settle

if TYPE_CHECKING:
    import ctypes

    from torch.distributed import ProcessGroup

    from tokenspeed_plugin.kernels.comm.abi import Arrival

_ALIGNED_ROWS: Final = 128
"""Parts end at multiples of it, where the tiles of a matrix product end."""
_TRIAL_ROWS: Final = 2


class Terms(NamedTuple):
    """What a sum over ranks is made of, `[rows, hidden]`: the sum itself, or this rank's term and the only other one."""

    own: torch.Tensor
    other: torch.Tensor | None = None

    def total(self) -> torch.Tensor:
        """The sum, rounded once."""
        return self.own if self.other is None else self.own + self.other


class Arriving(NamedTuple):
    """A peer's rows `[rows, hidden]`, of which some may be there, and when the parts of them are."""

    rows: torch.Tensor
    parts: ctypes.Array[Arrival]
    num_parts: int


class Transfer(Protocol):
    """One call: the sum over ranks of a product that comes in parts."""

    def start(self, part: int, first: int, end: int) -> None:
        """Begin with rows `first` to `end` of the product, which the current stream has computed."""
        ...

    def wait(self, part: int, first: int, end: int) -> Terms:
        """The terms of a part that was begun; on GPUs the current stream waits for them, and not the host."""
        ...

    def arriving(self, parts: tuple[tuple[int, int], ...]) -> Arriving | None:
        """All parts, which were begun, for a kernel that waits for each itself; None: `wait` has to."""
        ...


class Exchange(Protocol):
    """Sums over the ranks of a group, which all make the same calls in the same order, with the same parts.

    Attributes:
        way: what sums, for the log.
        max_rows: rows of a call, at most; None: any number.
    """

    way: str
    max_rows: int | None

    def begin(self, product: torch.Tensor) -> Transfer:
        """A call for `product` `[rows, hidden]`, contiguous; it may be overwritten, and must be left alone until the last wait."""
        ...


@functools.lru_cache(maxsize=256)
def parts_of_product(rows: int, part_rows: int) -> tuple[tuple[int, int], ...]:
    """Parts of a product that are computed one after the other; one when there is nothing to overlap."""
    count = num_parts(rows, part_rows)
    aligned = _ALIGNED_ROWS if part_rows >= _ALIGNED_ROWS else 1
    return tuple(pairwise((0, *(-(-rows * index // count // aligned) * aligned for index in range(1, count)), rows)))


@dataclass(frozen=True)
class Overlap:
    """How large steps are cut into parts.

    Attributes:
        exchange: what sums the parts over the ranks.
        part_rows: rows of a part, at least; a step of less than two parts is left whole.
    """

    exchange: Exchange
    part_rows: int = PART_ROWS

    @property
    def least_rows(self) -> int:
        """Rows of the smallest step that is cut."""
        return 2 * self.part_rows

    def parts(self, rows: int) -> tuple[tuple[int, int], ...]:
        """First row of each part and the one behind its last; one part when there is nothing to overlap."""
        most = self.exchange.max_rows
        if most is not None and rows > most:
            return ((0, rows),)
        return parts_of_product(rows, self.part_rows)


@functools.lru_cache(maxsize=256)
def parts_of_sum(rows: int, row_bytes: int) -> tuple[tuple[int, int], ...]:
    """Parts of a sum whose terms are there as a whole."""
    count = max(1, min(rows * row_bytes // SUM_PART_BYTES, MAX_PARTS))
    return tuple(pairwise([rows * index // count for index in range(count + 1)]))


class _GroupTransfer:
    def __init__(self, group: ProcessGroup, product: torch.Tensor) -> None:
        self._group, self._product = group, product
        self._works: dict[int, distributed.Work] = {}

    def start(self, part: int, first: int, end: int) -> None:
        work: distributed.Work | None = distributed.all_reduce(
            self._product[first:end], group=self._group, async_op=True
        )
        if work is None:
            raise ValueError("this process is no member of the group")
        self._works[part] = work

    def wait(self, part: int, first: int, end: int) -> Terms:
        self._works.pop(part).wait()
        return Terms(self._product[first:end])

    def arriving(self, parts: tuple[tuple[int, int], ...]) -> None:
        """NCCL says when a part is there to streams only."""


class GroupExchange:
    """The all-reduce of a torch process group, which NCCL runs on a stream of its own; reduces in place."""

    way = "the all-reduce of torch's process group"
    max_rows: int | None = None

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def begin(self, product: torch.Tensor) -> Transfer:
        """See `Exchange`."""
        return _GroupTransfer(self._group, product)


def trial(exchange: Exchange, cpu_group: ProcessGroup, like: torch.Tensor) -> str | None:
    """What goes wrong with sums whose results are known, of rows like `like`; the same on all ranks, None when nothing does.

    The first call also sets up what the group needs, before memory is counted and before another rank is waited for.
    """
    size, rank, problem = cpu_group.size(), cpu_group.rank(), None
    try:
        for call in (1, 2, 3):  # more than there are buffers in turn
            own = torch.full((_TRIAL_ROWS, *like.shape), float(call * (rank + 1)), dtype=like.dtype, device=like.device)
            transfer = exchange.begin(own)
            transfer.start(0, 0, _TRIAL_ROWS)
            found, expected = transfer.wait(0, 0, _TRIAL_ROWS).total(), call * size * (size + 1) / 2
            if not bool((found == expected).all()):
                problem = f"the sum of all ranks is {float(found[0, 0])} instead of {expected}"
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
    return settle(cpu_group, problem)
