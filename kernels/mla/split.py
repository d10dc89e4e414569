# SPDX-License-Identifier: Apache-2.0
"""The split plan of MLA decode in Python: what `plan_kernel` (sm90/csrc/plan.cuh) computes on the device, word by word."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from tokenspeed_plugin.kernels.mla.geometry import TILE_TOKENS


@dataclass(frozen=True)
class GroupSpan:
    """The tiles of one group: `tiles` of them, from tile `first_tile` of request `request` on, through later requests."""

    request: int
    first_tile: int
    tiles: int


@dataclass(frozen=True)
class SplitPlan:
    """Spans by group, and for each request the first and last group that work on it; last is -1 without tokens."""

    spans: tuple[GroupSpan, ...]
    first_group: tuple[int, ...]
    last_group: tuple[int, ...]

    @classmethod
    def of(cls, seq_lens: Sequence[int], groups: int) -> SplitPlan:
        """Deal the tiles of all requests, laid end to end, to the groups in equal contiguous spans.

        Raises:
            ValueError: there is no request or no group.
        """
        if not seq_lens or groups < 1:
            raise ValueError(f"{len(seq_lens)} requests and {groups} groups: both must be at least 1")
        tiles = [-(-max(length, 0) // TILE_TOKENS) for length in seq_lens]
        starts = [0, *accumulate(tiles)]
        used = max(1, min(groups, starts[-1]))
        bounds = [min(group, used) * starts[-1] // used for group in range(groups + 1)]
        spans = []
        for begin, end in pairwise(bounds):
            # The last request that starts there: those before it that start there too are empty.
            request = max(0, bisect_right(starts[:-1], begin) - 1)
            spans.append(GroupSpan(request, begin - starts[request], end - begin))
        first, last = [], []
        for begin, end in pairwise(starts):
            first.append(((begin + 1) * used - 1) // starts[-1] if end > begin else 0)
            last.append((end * used - 1) // starts[-1] if end > begin else -1)
        return cls(tuple(spans), tuple(first), tuple(last))
