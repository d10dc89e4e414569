# SPDX-License-Identifier: Apache-2.0
"""The core's counters as vLLM's SchedulerStats, so that its log lines and Prometheus metrics keep their names and meaning."""

from typing import TYPE_CHECKING, Any

from tokenspeed_plugin.host.names import (
    KVCacheEvictionEvent,
    ModelMetrics,
    PrefixCacheStats,
    SchedulerStats,
    SpecDecodingStats,
)
from tokenspeed_plugin.scheduler_fsm.kv_cache_report import KvCacheReport
from tokenspeed_plugin.scheduler_fsm.pace_report import PaceReport

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import PerfStats, SchedulerOutput, VllmConfig
    from tokenspeed_plugin.scheduler_fsm._core import Core, DraftTally
    from tokenspeed_plugin.scheduler_fsm.pace import PaceClock


class Statistics:
    """Turns counters since start into the differences per report that vLLM adds up."""

    def __init__(self, core: "Core", vllm_config: "VllmConfig") -> None:
        self._core = core
        self._num_draft_tokens: int = vllm_config.num_speculative_tokens
        observability = vllm_config.observability_config
        self._follows_blocks = bool(observability.kv_cache_metrics)
        model_metrics = ModelMetrics(vllm_config) if observability.enable_mfu_metrics else None
        # One that knows no part of the model has nothing to say.
        self._model_metrics = model_metrics if model_metrics is not None and model_metrics.is_enabled() else None
        self._reported = core.counters()
        self._kv_cache = KvCacheReport(core)
        self._pace: PaceReport | None = None
        self._was_reset = False

    def follow_pace(self, clock: "PaceClock") -> None:
        """Steps are measured from now on: somebody has a rate."""
        self._pace = PaceReport(self._core, clock)

    def note_reset(self) -> None:
        """The prefix cache was reset: hit rates start anew."""
        self._was_reset = True

    def report(
        self,
        cudagraph_stats: Any = None,
        drafts: "DraftTally | None" = None,
        step: "SchedulerOutput | None" = None,
        connector: dict[str, Any] | None = None,
    ) -> SchedulerStats:
        """What happened since the last report.

        Args:
            cudagraph_stats: of the model runner, passed through.
            drafts: how the step's drafts fared.
            step: whose results came in.
            connector: the part of a KV connector.
        """
        core = self._core
        num_skipped = core.num_skipped
        prefix_cache = self._prefix_cache()
        extras = connector or {}
        ours = self._kv_cache.take(self._reported, is_busy=core.num_running > 0)
        if self._pace is not None:
            ours |= self._pace.take()
        if ours:
            extras = extras | {"num_kv_fetch_reqs_by_stage": extras.get("num_kv_fetch_reqs_by_stage", {}) | ours}
        return SchedulerStats(
            num_running_reqs=core.num_running,
            num_waiting_reqs=core.num_waiting - num_skipped,
            num_skipped_waiting_reqs=num_skipped,
            kv_cache_usage=core.kv_usage,
            prefix_cache_stats=prefix_cache,
            kv_cache_eviction_events=self._evictions(),
            cudagraph_stats=cudagraph_stats,
            spec_decoding_stats=None if drafts is None or step is None else self._speculation(drafts, step),
            perf_stats=self._performance(step),
            **extras,
        )

    def _performance(self, step: "SchedulerOutput | None") -> "PerfStats | None":
        if self._model_metrics is None or step is None:
            return None
        return self._model_metrics.get_step_perf_stats_per_gpu(step)

    def _evictions(self) -> list[KVCacheEvictionEvent]:
        if not self._follows_blocks:
            return []
        return [KVCacheEvictionEvent(*life) for life in self._core.drain_block_lives()]

    def _speculation(self, drafts: "DraftTally", step: "SchedulerOutput") -> SpecDecodingStats:
        num_rows, num_drafts, num_accepted, drafts_by_position, accepted_by_position = drafts
        stats = SpecDecodingStats.new(self._num_draft_tokens)
        stats.num_drafts = num_rows
        stats.num_draft_tokens = num_drafts
        stats.num_accepted_tokens = num_accepted
        stats.num_draft_tokens_per_pos[: len(drafts_by_position)] = drafts_by_position
        stats.num_accepted_tokens_per_pos[: len(accepted_by_position)] = accepted_by_position
        # What a grammar ruled out was never proposed to the model: the last drafts of a request.
        for req_id, num_invalid in (step.num_invalid_spec_tokens or {}).items():
            num_planned = len(step.scheduled_spec_decode_tokens.get(req_id, ()))
            for position in range(num_planned - num_invalid, num_planned):
                if stats.num_draft_tokens_per_pos[position] > 0:
                    stats.num_draft_tokens_per_pos[position] -= 1
                    stats.num_draft_tokens -= 1
        return stats

    def _prefix_cache(self) -> PrefixCacheStats:
        now = self._core.counters()
        before, self._reported = self._reported, now
        stats = PrefixCacheStats(
            reset=self._was_reset,
            requests=now["cache_requests"] - before["cache_requests"],
            queries=now["cache_queried_tokens"] - before["cache_queried_tokens"],
            hits=now["cache_hit_tokens"] - before["cache_hit_tokens"],
            preempted_requests=now["readmissions"] - before["readmissions"],
            preempted_queries=now["readmission_queried_tokens"] - before["readmission_queried_tokens"],
            preempted_hits=now["readmission_hit_tokens"] - before["readmission_hit_tokens"],
        )
        self._was_reset = False
        return stats
