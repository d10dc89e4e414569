# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler with limits that can be changed while nothing runs, so that one engine stands for many tunings.

A request whose `extra_args` carry TUNING_KEY sets them before it is added; planning itself is vLLM's, untouched.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from benchmarks.agentic.stock_limits import TUNING_KEY, StockLimits


class TunableScheduler(AsyncScheduler):  # type: ignore[misc] # vLLM is untyped here
    """Stock with changeable limits; they cannot exceed those that the engine was started with."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._most = StockLimits(self.max_num_running_reqs, self.max_num_scheduled_tokens)

    def add_request(self, request: Any) -> None:
        """Add a request; take its limits over first when it carries any."""
        sampling = request.sampling_params
        limits = (sampling.extra_args or {}).get(TUNING_KEY) if sampling is not None else None
        if limits is not None:
            self.limit(StockLimits(**limits))
        super().add_request(request)

    def limit(self, limits: StockLimits) -> None:
        """Plan within `limits` from now on. Raises ValueError for limits beyond those of the start."""
        for name in ("max_num_seqs", "budget_tokens"):
            value, most = getattr(limits, name), getattr(self._most, name)
            if not 1 <= value <= most:
                raise ValueError(f"{name} is {value}; allowed: 1 to {most}, with which the engine was started")
        self.max_num_running_reqs = limits.max_num_seqs
        if hasattr(self, "max_num_active_reqs"):
            self.max_num_active_reqs = limits.max_num_seqs
        self.max_num_scheduled_tokens = limits.budget_tokens
        self.scheduler_config.long_prefill_token_threshold = limits.long_prefill_tokens
