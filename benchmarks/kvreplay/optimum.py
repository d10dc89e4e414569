# SPDX-License-Identifier: Apache-2.0
"""Belady's optimum: what a cache of a given size could have kept at best, the future being known."""

from __future__ import annotations

import heapq
import itertools

import numpy as np

from benchmarks.kvreplay.trace import Trace

_NEVER = np.iinfo(np.int32).max


class Optimum:
    """Evicts what is needed again last; of what one request needs, the deepest block first.

    Every block costs the same to compute again and every request needs all of its blocks, so this is exact: a block is never
    needed later than a block behind it, and what stays of a prompt is always a prefix of it. So it is enough to keep *pieces*: blocks
    in a row with the same next use.
    """

    def __init__(self, trace: Trace) -> None:
        self._num_blocks = [len(turn.blocks) for turn in trace.turns]
        self._num_seen = [turn.num_seen for turn in trace.turns]
        self._pieces: list[list[tuple[int, int, int]]] = [[] for _ in trace.turns]
        next_use = np.full(trace.num_blocks, _NEVER, dtype=np.int32)
        for index in range(len(trace.turns) - 1, -1, -1):
            blocks = trace.turns[index].blocks
            if len(blocks) == 0:
                continue
            uses = next_use[blocks]
            next_use[blocks] = index
            starts = [0, *(np.flatnonzero(np.diff(uses)) + 1).tolist(), len(blocks)]
            self._pieces[index] = [(int(uses[start]), start, end - start) for start, end in itertools.pairwise(starts)]

    def num_recomputed_blocks(self, capacity_blocks: int) -> int:
        """Blocks that had been computed before and must be computed again."""
        heap: list[tuple[int, int, int]] = []  # (-next use, -first depth, length)
        waiting: dict[int, int] = {}  # next use -> blocks kept for it
        num_kept = num_recomputed = 0
        for index, num_blocks in enumerate(self._num_blocks):
            num_hits = waiting.pop(index, 0)
            num_recomputed += self._num_seen[index] - num_hits
            num_kept -= num_hits
            while num_kept + num_blocks > capacity_blocks:
                minus_use, minus_depth, length = heapq.heappop(heap)
                if -minus_use <= index:
                    continue  # it was used
                cut = min(length, num_kept + num_blocks - capacity_blocks)
                num_kept -= cut
                waiting[-minus_use] -= cut
                if cut < length:
                    heapq.heappush(heap, (minus_use, minus_depth, length - cut))
            for use, depth, length in self._pieces[index]:
                heapq.heappush(heap, (-use, -depth, length))
                waiting[use] = waiting.get(use, 0) + length
            num_kept += num_blocks
        return num_recomputed
