# SPDX-License-Identifier: Apache-2.0
"""Which decode batches of an engine a kernel takes, and which stay with the host's own backend.

A captured graph serves all lengths, so the lengths of a batch cannot decide: a kernel takes a batch size when its worst time
over the measured lengths, in multiples of the host's, is no worse than the host's worst in multiples of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tokenspeed_plugin.kernels.autotune import TuningTable
from tokenspeed_plugin.kernels.mla.solutions import BF16, decode_shape
from tokenspeed_plugin.kernels.registry import KernelSpec, Signature

PAGE_TOKENS = 64
"""Tokens of a kernel page: what everything here was measured with, and what the engine is made to use."""
QUERY_TOKENS = (1, 2, 4, 8)
"""Query tokens per request that a batch is rounded up to."""
_HEADS = (16, 32, 64, 128)
_REQUESTS = tuple(1 << exponent for exponent in range(12))
_CONTEXTS = tuple(1 << exponent for exponent in range(8, 22))


def rounded_query_tokens(query_tokens: int) -> int | None:
    """The smallest of `QUERY_TOKENS` that holds a batch whose longest request has `query_tokens`; None when none does."""
    return next((count for count in QUERY_TOKENS if count >= query_tokens), None)


@dataclass(frozen=True)
class Verdict:
    """Whether the kernel takes a batch, and why."""

    taken: bool
    reason: str


class DecodeShare:
    """The batches that a kernel takes from the host's backend, by query tokens and number of requests.

    Args:
        spec: the kernel.
        host: solution that stands for the host's backend in the measurements.
        heads: query heads on one GPU.
        max_context_tokens: longest context that the engine allows.
        tuning: measurements; a head count that was not measured goes by the next larger one that was.
        named: the kernel was asked for by name, and takes every batch that it can run.
        formats: of decode's operands, by which it was measured.
    """

    def __init__(
        self,
        spec: KernelSpec,
        host: str,
        heads: int,
        max_context_tokens: int,
        tuning: TuningTable,
        *,
        named: bool = False,
        formats: Signature = BF16,
    ) -> None:
        self._spec, self._host, self._heads = spec, host, heads
        self._max_context_tokens, self._tuning, self._named = max_context_tokens, tuning, named
        self._formats = formats
        self._verdicts: dict[tuple[int, int], Verdict] = {}

    @property
    def solution(self) -> str:
        """Name of the kernel."""
        return self._spec.solution

    def takes(self, query_tokens: int, requests: int) -> bool:
        """Whether the kernel takes a batch of `requests`, of which the longest has `query_tokens`."""
        return self.verdict(query_tokens, requests).taken

    def verdict(self, query_tokens: int, requests: int) -> Verdict:
        """The same with the reason; worked out once for each pair."""
        found = self._verdicts.get((query_tokens, requests))
        if found is None:
            found = self._verdicts[query_tokens, requests] = self._judge(query_tokens, requests)
        return found

    def takes_anything(self) -> bool:
        """Whether there is a batch that the kernel takes."""
        return any(self.takes(count, requests) for count in QUERY_TOKENS for requests in _REQUESTS)

    def _judge(self, query_tokens: int, requests: int) -> Verdict:
        rounded = rounded_query_tokens(query_tokens)
        if rounded is None:
            return Verdict(False, f"{query_tokens} query tokens, at most {QUERY_TOKENS[-1]} are taken")
        shape = decode_shape(self._heads, rounded, PAGE_TOKENS, requests, self._max_context_tokens)
        if refusal := next((why for trait in self._spec.traits if (why := trait.refusal(shape))), None):
            return Verdict(False, refusal)
        if self._named:
            return Verdict(True, "asked for by name")
        ratios, where = self._nearest_ratios(rounded, requests)
        if not ratios:
            return Verdict(False, f"nothing was measured for {rounded} query tokens")
        ours, theirs = max(ratios), 1 / min(ratios)
        words = f"{min(ratios):.2f} to {max(ratios):.2f} x the time of {self._host} ({where})"
        return Verdict(ours <= theirs, words)

    def _nearest_ratios(self, query_tokens: int, requests: int) -> tuple[list[float], str]:
        """Kernel's time over the host's, at the lengths of the nearest number of requests that was measured."""
        for heads in (self._heads, *(count for count in _HEADS if count > self._heads)):
            by_requests = {count: ratios for count in _REQUESTS if (ratios := self._ratios(heads, query_tokens, count))}
            if by_requests:
                nearest = min(by_requests, key=lambda count: (abs(math.log2(count / requests)), -count))
                return by_requests[nearest], f"measured with {heads} heads, {nearest} requests"
        return [], ""

    def _ratios(self, heads: int, query_tokens: int, requests: int) -> list[float]:
        found: dict[int, float] = {}
        for context in _CONTEXTS:
            shape = decode_shape(heads, query_tokens, PAGE_TOKENS, requests, context)
            times = self._tuning.times_us("mla", "decode", self._formats, shape)
            if self._spec.solution in times and self._host in times:
                found[context] = times[self._spec.solution] / times[self._host]
        reachable = [ratio for context, ratio in found.items() if context < 2 * self._max_context_tokens]
        return reachable or [ratio for context, ratio in sorted(found.items())[:1]]
