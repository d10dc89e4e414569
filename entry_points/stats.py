# SPDX-License-Identifier: Apache-2.0
"""The flat KV cache at `/metrics`, beside vLLM's own metrics and with their labels.

vLLM's group of stat-logger plugins is not used: a plugin in it turns statistics on for everybody, whatever `--disable-log-stats` says
and whichever scheduler runs. The logger is added to the managers of engines with this scheduler instead (`host/patches.py`).
"""

from typing import Any

from prometheus_client import Counter, Gauge

from tokenspeed_plugin.host.kv_metrics import BLOCK_STATES, EVICTION_KINDS, LOSS_REASONS, take_payload
from tokenspeed_plugin.host.names import AggregateStatLoggerBase

_LABELS = ["model_name", "engine"]


class KvCacheStatLogger(AggregateStatLoggerBase):
    """Adds up what the schedulers of all engines report."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        self._model_name: str = vllm_config.model_config.served_model_name
        self._engines = engine_indexes
        self._metrics: _Metrics | None = None

    def log_engine_initialized(self) -> None:
        """Registers the metrics. Not earlier: vLLM's own logger, built after this one, removes all that are named like its own."""
        self._metrics = _Metrics(self._model_name, self._engines)

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
        values = take_payload(scheduler_stats)
        if values and self._metrics is not None:
            self._metrics.observe(values, engine_idx)


class _Metrics:
    def __init__(self, model_name: str, engines: list[int]) -> None:
        self._lost = Counter(
            "vllm:tokenspeed_kv_lost_hit_tokens",
            "Prompt tokens computed again though they had been computed before, by reason.",
            [*_LABELS, "reason"],
        )
        self._evictions = Counter(
            "vllm:tokenspeed_kv_evictions",
            "Cached KV blocks given up, by what they were thought to be worth.",
            [*_LABELS, "kind"],
        )
        self._copies = Counter(
            "vllm:tokenspeed_kv_block_copies", "KV blocks copied because a prefix ended inside them.", _LABELS
        )
        self._skipped_states = Counter(
            "vllm:tokenspeed_kv_skipped_states",
            "States at the end of a shared prefix that were not kept, for lack of a block.",
            _LABELS,
        )
        self._blocks = Gauge(
            "vllm:tokenspeed_kv_blocks",
            "KV blocks by state.",
            [*_LABELS, "state"],
            multiprocess_mode="mostrecent",
        )
        self._fragmentation = Gauge(
            "vllm:tokenspeed_kv_fragmentation_perc",
            "Share of the KV blocks in use that holds no token yet. 1 means 100 percent.",
            _LABELS,
            multiprocess_mode="mostrecent",
        )
        self._model_name = model_name
        for engine in engines:
            self._show(engine)

    def observe(self, values: dict[str, int], engine: int) -> None:
        """Adds up one report (`scheduler_fsm/kv_cache_report.py`)."""
        labels = self._model_name, str(engine)
        for reason in LOSS_REASONS:
            self._lost.labels(*labels, reason).inc(values[f"lost:{reason}"])
        for kind in EVICTION_KINDS:
            self._evictions.labels(*labels, kind).inc(values[f"evicted:{kind}"])
        self._copies.labels(*labels).inc(values["copied"])
        self._skipped_states.labels(*labels).inc(values["states_skipped"])
        for state in BLOCK_STATES:
            self._blocks.labels(*labels, state).set(values[f"blocks:{state}"])
        self._fragmentation.labels(*labels).set(values["fragmentation_ppm"] / 1e6)

    def _show(self, engine: int) -> None:
        """Shows counters from the start, as zeros."""
        labels = self._model_name, str(engine)
        for reason in LOSS_REASONS:
            self._lost.labels(*labels, reason)
        for kind in EVICTION_KINDS:
            self._evictions.labels(*labels, kind)
        self._copies.labels(*labels)
        self._skipped_states.labels(*labels)
