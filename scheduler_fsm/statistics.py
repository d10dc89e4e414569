# SPDX-License-Identifier: Apache-2.0
"""The core's counters as vLLM's SchedulerStats, so that its log lines and Prometheus metrics keep their names and meaning."""

from typing import TYPE_CHECKING, Any

from tokenspeed_plugin.host.names import PrefixCacheStats, SchedulerStats, SpecDecodingStats

if TYPE_CHECKING:
    from tokenspeed_plugin.scheduler_fsm._core import Core, DraftTally


class Statistics:
    """Turns counters since start into the differences per report that vLLM adds up."""

    def __init__(self, core: "Core", num_draft_tokens: int) -> None:
        self._core = core
        self._num_draft_tokens = num_draft_tokens
        self._reported = core.counters()
        self._was_reset = False

    def note_reset(self) -> None:
        """The prefix cache was reset: hit rates start anew."""
        self._was_reset = True

    def report(
        self,
        cudagraph_stats: Any = None,
        drafts: "DraftTally | None" = None,
        num_invalid_drafts: dict[str, int] | None = None,
        connector: dict[str, Any] | None = None,
    ) -> SchedulerStats:
        """What happened since the last report.

        Args:
            cudagraph_stats: of the model runner, passed through.
            drafts: how the step's drafts fared.
            num_invalid_drafts: by request, drafts that a grammar ruled out before they were verified.
            connector: the part of a KV connector.
        """
        core = self._core
        num_skipped = core.num_skipped
        return SchedulerStats(
            num_running_reqs=core.num_running,
            num_waiting_reqs=core.num_waiting - num_skipped,
            num_skipped_waiting_reqs=num_skipped,
            kv_cache_usage=core.kv_usage,
            prefix_cache_stats=self._prefix_cache(),
            cudagraph_stats=cudagraph_stats,
            spec_decoding_stats=self._speculation(drafts, num_invalid_drafts),
            **(connector or {}),
        )

    def _speculation(
        self, drafts: "DraftTally | None", num_invalid_drafts: dict[str, int] | None
    ) -> SpecDecodingStats | None:
        if drafts is None:
            return None
        num_rows, num_drafts, num_accepted, drafts_by_position, accepted_by_position = drafts
        stats = SpecDecodingStats.new(self._num_draft_tokens)
        stats.num_drafts = num_rows
        stats.num_draft_tokens = max(0, num_drafts - sum((num_invalid_drafts or {}).values()))
        stats.num_accepted_tokens = num_accepted
        stats.num_draft_tokens_per_pos[: len(drafts_by_position)] = drafts_by_position
        stats.num_accepted_tokens_per_pos[: len(accepted_by_position)] = accepted_by_position
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
