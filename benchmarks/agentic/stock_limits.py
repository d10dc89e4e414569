# SPDX-License-Identifier: Apache-2.0
"""The limits of stock's scheduler that operators turn, and how a request carries them to a running engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

TUNING_KEY = "scheduler_limits"


@dataclass(frozen=True)
class StockLimits:
    """What operators of stock turn.

    Args:
        max_num_seqs: requests that run at a time.
        budget_tokens: tokens of a step.
        long_prefill_tokens: most tokens of one prompt in a step; 0 is no limit.
    """

    max_num_seqs: int
    budget_tokens: int
    long_prefill_tokens: int = 0

    def as_extra_args(self) -> dict[str, Any]:
        """Return what a request carries to set these limits."""
        return {TUNING_KEY: asdict(self)}
