# SPDX-License-Identifier: Apache-2.0
"""The flat KV cache at `/metrics`, beside vLLM's own metrics and with their labels.

vLLM's group of stat-logger plugins is not used: a plugin in it turns statistics on for everybody, whatever `--disable-log-stats` says
and whichever scheduler runs. The logger is added to the managers of engines with this scheduler instead (`host/patches.py`).
"""

from prometheus_client import Counter, Gauge

from tokenspeed_plugin.entry_points.report_logger import LABELS, ReportLogger, ReportMetrics
from tokenspeed_plugin.host.kv_metrics import BLOCK_STATES, EVICTION_KINDS, LOSS_REASONS


class KvCacheStatLogger(ReportLogger):
    """Adds up what the schedulers of all engines report."""

    def make_metrics(self, model_name: str, engines: list[int]) -> ReportMetrics:
        """Registers the metrics and shows zeros."""
        return _Metrics(model_name, engines)


class _Metrics:
    def __init__(self, model_name: str, engines: list[int]) -> None:
        self._lost = Counter(
            "vllm:tokenspeed_kv_lost_hit_tokens",
            "Prompt tokens computed again though they had been computed before, by reason.",
            [*LABELS, "reason"],
        )
        self._evictions = Counter(
            "vllm:tokenspeed_kv_evictions",
            "Cached KV blocks given up, by what they were thought to be worth.",
            [*LABELS, "kind"],
        )
        self._copies = Counter(
            "vllm:tokenspeed_kv_block_copies", "KV blocks copied because a prefix ended inside them.", LABELS
        )
        self._skipped_states = Counter(
            "vllm:tokenspeed_kv_skipped_states",
            "States at the end of a shared prefix that were not kept, for lack of a block.",
            LABELS,
        )
        self._blocks = Gauge(
            "vllm:tokenspeed_kv_blocks",
            "KV blocks by state.",
            [*LABELS, "state"],
            multiprocess_mode="mostrecent",
        )
        self._fragmentation = Gauge(
            "vllm:tokenspeed_kv_fragmentation_perc",
            "Share of the KV blocks in use that holds no token yet. 1 means 100 percent.",
            LABELS,
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
