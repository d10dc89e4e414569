# SPDX-License-Identifier: Apache-2.0
"""vLLM's own Request objects, kept true where somebody reads them."""

from typing import TYPE_CHECKING

from tokenspeed_plugin.host.names import EngineCoreEventType, RequestStatus

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import Request


class RequestMirror:
    """Writes what the core did into vLLM's requests: status, events for its metrics, prefill statistics."""

    def __init__(self, *, log_stats: bool) -> None:
        """Args: log_stats: whether vLLM wants events."""
        self._log_stats = log_stats

    def queued(self, request: "Request") -> None:
        """The core took it in."""
        if self._log_stats:
            request.record_event(EngineCoreEventType.QUEUED)

    def admitted(self, request: "Request", num_cached_tokens: int, num_loaded_tokens: int, now_s: float) -> None:
        """It runs from now on.

        Args:
            request: that was waiting.
            num_cached_tokens: of its tokens, served by the prefix cache.
            num_loaded_tokens: of its tokens, loaded by a connector.
            now_s: monotonic clock.
        """
        request.status = RequestStatus.RUNNING
        # A repeated prefill after a preemption is not what its client calls its prompt; one that only loaded before is its first.
        stats = request.prefill_stats
        if stats is not None and (request.num_preemptions == 0 or stats.num_prompt_tokens == 0):
            stats.set(
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached_tokens=num_cached_tokens,
                num_external_cached_tokens=num_loaded_tokens,
            )
        if self._log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED, now_s)

    def fed(self, session: "Request", chunk: "Request", token_ids: list[int]) -> None:
        """A session goes on with new input.

        Args:
            session: the request that lives on.
            chunk: the request that brought the input.
            token_ids: the whole prompt of the turn. Workers may keep the list, so it is a new one each time.
        """
        session.status = RequestStatus.WAITING
        session.prompt_token_ids = token_ids
        session.num_prompt_tokens = len(token_ids)
        session._all_token_ids[:] = token_ids
        session._output_token_ids.clear()
        session.sampling_params = chunk.sampling_params
        session.max_tokens = chunk.max_tokens
        session.arrival_time = chunk.arrival_time
        self.queued(session)

    def preempted(self, request: "Request", now_s: float) -> None:
        """Its KV was taken; it waits again."""
        if request.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        if self._log_stats:
            request.record_event(EngineCoreEventType.PREEMPTED, now_s)
