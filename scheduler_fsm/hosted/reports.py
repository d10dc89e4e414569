# SPDX-License-Identifier: Apache-2.0
"""What vLLM's scheduler reports of its KV cache manager: hit rates, lives of blocks, events."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenspeed_plugin.host.names import (
    BlockStored,
    KVCacheEvictionEvent,
    PrefixCacheStats,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from tokenspeed_plugin.scheduler_fsm._core import HostedKv
from tokenspeed_plugin.scheduler_fsm.kv_cache_report import KvCacheReport
from tokenspeed_plugin.scheduler_fsm.kv_event_feed import vllm_event

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import KVCacheEvent, KVCacheMetricsCollector, KVCacheSpec, Request


class ManagerReports:
    """The reporting members of vLLM's KVCacheManager."""

    def __init__(
        self,
        kv: HostedKv,
        specs: "Sequence[KVCacheSpec]",
        *,
        enable_caching: bool,
        log_stats: bool,
        metrics_collector: "KVCacheMetricsCollector | None",
        enable_kv_cache_events: bool,
    ) -> None:
        """Set what is reported.

        Args:
            kv: what is reported on.
            specs: vLLM's, by group.
            enable_caching: prefix caching.
            log_stats: hit rates are wanted.
            metrics_collector: takes the lives of blocks.
            enable_kv_cache_events: events are wanted.
        """
        self._kv = kv
        self._event_specs = [(get_kv_cache_spec_kind(s).value, get_kv_cache_spec_sliding_window(s)) for s in specs]
        self.enable_caching = enable_caching
        self.enable_kv_cache_events = enable_kv_cache_events
        self.log_stats = log_stats
        self.metrics_collector = metrics_collector
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self._report = KvCacheReport(kv)

    def prefix_cache_lookup_enabled(self, request: "Request") -> bool:
        """Whether the request may read the cache."""
        return self.enable_caching and not request.skip_reading_prefix_cache

    @property
    def usage(self) -> float:
        """Share of the blocks that have an owner, 0 to 1."""
        return 1.0 - self._kv.num_free / self._kv.num_usable

    def record_prefix_cache_stats(self, request: "Request", num_hits: int) -> None:
        """Count one lookup, at admission."""
        if self.prefix_cache_stats is not None and self.prefix_cache_lookup_enabled(request):
            self.prefix_cache_stats.record(
                num_tokens=request.num_tokens, num_hits=num_hits, preempted=request.num_preemptions > 0
            )

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Lookups since the last call. Hands the lives of blocks to vLLM's collector, which is asked next."""
        if self.metrics_collector is not None:
            lives = (KVCacheEvictionEvent(*life) for life in self._kv.drain_block_lives())
            self.metrics_collector._eviction_events.extend(lives)
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    def take_events(self) -> "list[KVCacheEvent]":
        """Changes of the hittable set since the last call."""
        if not self.enable_kv_cache_events:
            return []
        events = [vllm_event(*event) for event in self._kv.drain_kv_events()]
        for event in events:
            if isinstance(event, BlockStored):
                event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window = self._event_specs[event.group_idx]
        return events

    def take_report(self) -> dict[str, int]:
        """What the flat KV cache tells its metrics; empty when it is not time."""
        return self._report.take(self._kv.counters(), is_busy=self._kv.num_free < self._kv.num_usable)

    def eviction_counts(self) -> dict[str, int]:
        """Evictions and cached blocks by kind."""
        return self._kv.eviction_counts()

    def check_integrity(self) -> None:
        """Raise RuntimeError naming the first broken invariant. O(pool): for tests and idle times."""
        self._kv.check_integrity()
