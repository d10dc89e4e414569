# SPDX-License-Identifier: Apache-2.0
"""Which limits an operator would give stock vLLM to keep a rate: a search by what the tries before it measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from benchmarks.agentic.stock_limits import StockLimits

_FIXED_MS = 3.0  # of a step, whatever it holds; only the speed of the search depends on it
_AIM = 1.01  # a rate a little above the target is aimed at
_CLOSE = 0.03  # a next try that differs by less teaches nothing
_SMALL_BUDGET_TOKENS = 512


@dataclass
class StockSearch:
    """Tries under one load, beginning with the limits that the engine was started with, or with others that are known to be good.

    Args:
        target_tps: tokens/s per user that 95% of turns are to have.
        most: limits of the start.
        budget_tokens: tokens of a step in all tries but the first and the last.
        begin: the first try; None: the limits of the start.
    """

    target_tps: float
    most: StockLimits
    budget_tokens: int = 2048
    begin: StockLimits | None = None
    tried: list[tuple[StockLimits, dict[str, Any]]] = field(default_factory=list)

    def next(self) -> StockLimits | None:
        """Return what to try next; None when the search is over."""
        if not self.tried:
            return self.begin or self.most
        limits, figures = self.tried[-1]
        if limits == self.most and figures["tps_p5"] >= self.target_tps:
            return None  # this load needs no tuning
        seqs = self._seqs_after(limits, figures)
        if limits.budget_tokens == self._small_budget(limits.max_num_seqs):
            return None
        following = StockLimits(seqs, max(seqs, min(self.budget_tokens, self.most.budget_tokens)))
        tried = [limits for limits, _ in self.tried]
        if following in tried or (len(tried) > 1 and abs(seqs / limits.max_num_seqs - 1) < _CLOSE):
            best = self.best()
            following = StockLimits(best.max_num_seqs, self._small_budget(best.max_num_seqs))
        return None if following in tried else following

    def note(self, limits: StockLimits, figures: dict[str, Any]) -> None:
        """Take in what a try measured: `tps_p5`, `rows_mean`, `step_ms_mean`, `goodput_per_gpu`.

        Where requests wait for longer than the try takes, no turn has a rate; then that of a user who gets a token in every step counts.
        Limits of the start that were tried after others may be the best, but the search goes on from where it was.
        """
        place = 0 if limits == self.most else len(self.tried)
        self.tried.insert(place, (limits, figures))

    def best(self) -> StockLimits:
        """Return the limits with the most goodput, those that keep the target for 95% of turns first; those of the start without any try."""
        scored = [((f["tps_p5"] >= self.target_tps, f["goodput_per_gpu"]), limits) for limits, f in self.tried]
        return max(scored, key=lambda one: one[0])[1] if scored else self.most

    def _seqs_after(self, limits: StockLimits, figures: dict[str, Any]) -> int:
        """Return how many requests would have had the target, a step's time growing with them in a straight line."""
        running = min(limits.max_num_seqs, max(1.0, figures["rows_mean"]))
        wanted_ms = 1e3 / (self.target_tps * _AIM)
        rate = figures["tps_p5"]
        token_ms = figures["step_ms_mean"] if math.isnan(rate) else 1e3 / max(rate, 1e-3)
        growth = (wanted_ms - _FIXED_MS) / max(0.1, token_ms - _FIXED_MS)
        return max(1, min(self.most.max_num_seqs, round(running * min(max(growth, 0.25), 2.0))))

    def _small_budget(self, seqs: int) -> int:
        return min(self.most.budget_tokens, max(_SMALL_BUDGET_TOKENS, seqs + seqs // 2))
