# SPDX-License-Identifier: Apache-2.0
"""A timeline whose reports go through the manager that vLLM's engines have, into the real Prometheus registry."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY
from scheduler_knobs import Knobs
from vllm.v1.metrics.loggers import StatLoggerManager

from exact.timeline import Timeline


class WatchedTimeline(Timeline):
    """Reads metrics whose names begin with ``prefix``."""

    prefix: str

    def __init__(self, scheduler: str, knobs: Knobs, loggers: list[Any]) -> None:
        super().__init__(scheduler, knobs)
        self.config = self.harness.vllm_config
        self.manager = StatLoggerManager(self.config, [0], loggers, enable_default_loggers=True)
        self.manager.log_engine_initialized()
        self.left_over: list[dict[str, int]] = []

    def _note_outputs(self, outputs: Any) -> Any:
        for batch in outputs.values():
            if batch.scheduler_stats is not None:
                self.manager.record(batch.scheduler_stats, None)
                self.left_over.append(dict(batch.scheduler_stats.num_kv_fetch_reqs_by_stage))
        return super()._note_outputs(outputs)

    def value(self, name: str, **labels: str) -> float | None:
        labels = {"model_name": self.config.model_config.served_model_name, "engine": "0", **labels}
        return REGISTRY.get_sample_value(f"{self.prefix}{name}", labels)
