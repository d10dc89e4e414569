# SPDX-License-Identifier: Apache-2.0
"""Which prefills on a cached prefix our kernel takes, and up to how many new tokens queries go to the latent space instead.

The host settles the second by one number for the whole engine; the first can be asked for each batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tokenspeed_plugin.kernels.autotune import TuningTable
from tokenspeed_plugin.kernels.mla.cached_prefill.solutions import (
    ABSORBED,
    ABSORBED_QUERY_TOKENS,
    MODE,
    OURS,
    UNFOLDED,
)
from tokenspeed_plugin.kernels.mla.share import PAGE_TOKENS, Verdict
from tokenspeed_plugin.kernels.mla.solutions import BF16, decode_shape

_HEADS = (16, 32, 64, 128)
QUERY_TOKENS = (64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
"""New tokens that a measurement may have; others go by the nearest."""
_CONTEXTS = tuple(1 << exponent for exponent in range(10, 21))
_REACH = 2.0
"""How far beyond what was measured a verdict holds, as a factor."""


@dataclass(frozen=True)
class _Cell:
    query_tokens: int
    context_tokens: int
    times_us: dict[str, float]

    def distance(self, query_tokens: int, context_tokens: int) -> float:
        return abs(math.log2(self.query_tokens / query_tokens)) + abs(math.log2(self.context_tokens / context_tokens))


class PrefillShare:
    """The prefills that our kernel takes from the host's backend.

    Args:
        heads: query heads on one GPU; a count that was not measured goes by the next larger one.
        max_context_tokens: longest context that the engine allows.
        tuning: measurements of one request each.
    """

    def __init__(self, heads: int, max_context_tokens: int, tuning: TuningTable) -> None:
        larger = (count for count in _HEADS if count >= heads)
        found = (cells for count in larger if (cells := list(_cells(tuning, count))))
        self._cells = next(found, [])
        self._max_context_tokens = max_context_tokens
        self.absorbed_limit = self._absorbed_limit()

    def takes_anything(self) -> bool:
        """Whether there is a prefill that our kernel takes."""
        return any(self.verdict(cell.query_tokens, cell.context_tokens).taken for cell in self._cells)

    def verdict(self, query_tokens: int, context_tokens: int, host: str = "") -> Verdict:
        """Whether our kernel takes a request of so many new tokens on so many cached ones, and why.

        Args:
            query_tokens: new tokens.
            context_tokens: cached tokens before them.
            host: the host's way that it is held against; default: the one that the host takes by itself.
        """
        if context_tokens < 1 or not self._cells:
            return Verdict(False, "nothing is cached" if self._cells else "nothing was measured")
        nearest = min(self._cells, key=lambda cell: cell.distance(query_tokens, context_tokens))
        where = f"{nearest.query_tokens} new tokens on {nearest.context_tokens}"
        for asked, known in ((query_tokens, nearest.query_tokens), (context_tokens, nearest.context_tokens)):
            if not known / _REACH <= asked <= known * _REACH:
                return Verdict(False, f"not measured, the nearest is {where}")
        host = host or (ABSORBED if query_tokens <= ABSORBED_QUERY_TOKENS else UNFOLDED)
        if host not in nearest.times_us:
            return Verdict(False, f"{host} was not measured with {where}")
        ratio = nearest.times_us[OURS] / nearest.times_us[host]
        return Verdict(ratio < 1, f"{ratio:.2f} x the time of {host} (measured with {where})")

    def threshold(self, prefills: Iterable[tuple[int, int]]) -> int:
        """New tokens of a request up to which a batch's queries go to the latent space.

        Args:
            prefills: new tokens and cached tokens of the batch's requests.
        """
        between = (pair for pair in prefills if self.absorbed_limit < pair[0] <= ABSORBED_QUERY_TOKENS)
        return self.absorbed_limit if any(self.verdict(*pair).taken for pair in between) else ABSORBED_QUERY_TOKENS

    def _absorbed_limit(self) -> int:
        """The middle between the last count of new tokens that is better absorbed and the first that is not."""
        counts = sorted({cell.query_tokens for cell in self._cells if cell.query_tokens <= ABSORBED_QUERY_TOKENS})
        first = ABSORBED_QUERY_TOKENS + 1
        for count in reversed(counts):
            if not self._better(count):
                return math.isqrt(count * first) if first <= ABSORBED_QUERY_TOKENS else ABSORBED_QUERY_TOKENS
            first = count
        return max(first - 1, 0) if counts else ABSORBED_QUERY_TOKENS

    def _better(self, query_tokens: int) -> bool:
        """Whether our worst, in multiples of theirs, is better than their worst in multiples of ours."""
        ratios = [
            cell.times_us[OURS] / cell.times_us[ABSORBED]
            for cell in self._cells
            if cell.query_tokens == query_tokens
            and cell.context_tokens < 2 * self._max_context_tokens
            and ABSORBED in cell.times_us
        ]
        return bool(ratios) and max(ratios) * min(ratios) < 1


def _cells(tuning: TuningTable, heads: int) -> Iterable[_Cell]:
    for query_tokens in QUERY_TOKENS:
        for context_tokens in _CONTEXTS:
            shape = decode_shape(heads, query_tokens, PAGE_TOKENS, 1, context_tokens)
            times_us = tuning.times_us("mla", MODE, BF16, shape)
            if OURS in times_us:
                yield _Cell(query_tokens, context_tokens, times_us)
