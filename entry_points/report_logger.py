# SPDX-License-Identifier: Apache-2.0
"""What the loggers of this package have in common: each takes its part out of the reports of the schedulers."""

from abc import abstractmethod
from typing import Any, Protocol

from tokenspeed_plugin.host.kv_metrics import take_payload
from tokenspeed_plugin.host.names import AggregateStatLoggerBase

LABELS = ["model_name", "engine"]
"""Of every metric, as of vLLM's own."""


class ReportMetrics(Protocol):
    """Metrics in the registry."""

    def observe(self, values: dict[str, int], engine: int) -> None:
        """Adds up one report."""


class ReportLogger(AggregateStatLoggerBase):
    """Adds up what the schedulers of all engines report in the part that `take` knows."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        self._model_name: str = vllm_config.model_config.served_model_name
        self._engines = engine_indexes
        self._metrics: ReportMetrics | None = None

    @abstractmethod
    def make_metrics(self, model_name: str, engines: list[int]) -> ReportMetrics:
        """Registers the metrics."""

    def take(self, scheduler_stats: Any) -> dict[str, int]:
        """Takes our part out of a report; empty when there is none."""
        return take_payload(scheduler_stats)

    def log_engine_initialized(self) -> None:
        """Registers the metrics. Not earlier: vLLM's own logger, built after this one, removes all that are named like its own."""
        self._metrics = self.make_metrics(self._model_name, self._engines)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,  # noqa: ARG002
        mm_cache_stats: Any = None,  # noqa: ARG002
        engine_idx: int = 0,
    ) -> None:
        """Takes our part out of a report."""
        if scheduler_stats is None or not scheduler_stats.num_kv_fetch_reqs_by_stage:
            return
        values = self.take(scheduler_stats)
        if values and self._metrics is not None:
            self._metrics.observe(values, engine_idx)
