# SPDX-License-Identifier: Apache-2.0
"""Rates per user at `/metrics`, beside vLLM's own metrics and with their labels (see `stats.py`)."""

from itertools import product
from typing import Any

from prometheus_client import Counter, Gauge

from tokenspeed_plugin.entry_points.report_logger import LABELS, ReportLogger, ReportMetrics
from tokenspeed_plugin.host.kv_metrics import take_payload
from tokenspeed_plugin.host.pace_metrics import (
    CHUNK_TOKENS,
    COUNTS,
    DECODES,
    OF_A_CLASS,
    PREFIX,
    PROMPT_TOKENS,
    USERS_BELOW,
    class_entry,
)

_HELP = {
    "limited_steps": "Steps in which prompts got less than they could take, for the rate per user.",
    "held_admissions": "Plans in which the next request was held back, for the rate per user.",
    "shed_requests": "Requests retracted because decodes alone broke the rate per user.",
    "refused_requests": "Requests refused because the rate per user had no room for them.",
    "degraded_admissions": "Requests admitted though the rate per user had no room for them.",
}
_CLASS_METRICS = {
    "steps": ("steps", "Steps by shape, with a rate per user."),
    "predicted_us": ("predicted_seconds", "What the step-time model said these steps would take."),
    "measured_us": ("measured_seconds", "What they took."),
    "error_us": ("error_seconds", "Sum of |predicted - measured|."),
}


class PaceStatLogger(ReportLogger):
    """Adds up what the schedulers of all engines report. Shows nothing while nobody has a rate."""

    def make_metrics(self, model_name: str, engines: list[int]) -> ReportMetrics:  # noqa: ARG002
        """Registers the metrics."""
        return _Metrics(model_name)

    def take(self, scheduler_stats: Any) -> dict[str, int]:
        """Takes the part about rates."""
        return take_payload(scheduler_stats, PREFIX)


class _Metrics:
    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._counts = {name: Counter(f"vllm:tokenspeed_pace_{name}", _HELP[name], LABELS) for name in COUNTS}
        self._classes = {
            what: Counter(f"vllm:tokenspeed_pace_{name}", text, [*LABELS, "decodes", "prompt_tokens"])
            for what, (name, text) in _CLASS_METRICS.items()
        }
        self._gauges = {
            name: Gauge(f"vllm:tokenspeed_pace_{name}", text, LABELS, multiprocess_mode="mostrecent")
            for name, text in (
                (CHUNK_TOKENS, "Prompt tokens that the last step with waiting prompts allowed."),
                (USERS_BELOW, "Running users whose next token is overdue."),
            )
        }

    def observe(self, values: dict[str, int], engine: int) -> None:
        """Adds up one report (`scheduler_fsm/pace_report.py`)."""
        labels = self._model_name, str(engine)
        for name, counter in self._counts.items():
            counter.labels(*labels).inc(values[name])
        for name, gauge in self._gauges.items():
            gauge.labels(*labels).set(values[name])
        for decodes, prompts, what in product(DECODES, PROMPT_TOKENS, OF_A_CLASS):
            if value := values.get(class_entry(decodes, prompts, what)):
                scale = 1 if what == "steps" else 1e-6
                self._classes[what].labels(*labels, decodes, prompts).inc(value * scale)
