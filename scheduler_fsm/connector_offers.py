# SPDX-License-Identifier: Apache-2.0
"""What a KV connector offers to requests that are about to start. Called by the core in the middle of a plan."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tokenspeed_plugin.host.log import logger as named_logger
from tokenspeed_plugin.host.names import (
    KV_FETCH_COMPLETED_WAITING,
    KV_FETCH_IN_PROGRESS,
    KV_FETCH_WAITING_TO_START,
    PrefixCacheStats,
    RequestStatus,
)
from tokenspeed_plugin.kv_flat.pool_facade import allocated_blocks

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import Request

logger = named_logger(__name__)


class ConnectorOffers:
    """Asks a connector on behalf of the core. Nothing that the connector raises reaches the plan: the request fails instead.

    Attributes:
        loading: ids of requests whose load runs beside the steps.
        failed: requests about which the connector raised, for the scheduler to end.
    """

    def __init__(self, connector: Any, block_tokens: Sequence[int], hash_block_tokens: int) -> None:
        self._connector = connector
        self._block_tokens = block_tokens
        self._hash_block_tokens = hash_block_tokens
        self.loading: set[str] = set()
        self.failed: list[Request] = []
        self._loaded: set[str] = set()
        self._expected: set[str] = set()
        self._statistics = PrefixCacheStats()

    def expect(self, request: "Request") -> None:
        """A request arrived; one whose prompt comes from another engine is counted as waiting for it."""
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            self._expected.add(request.request_id)

    def offer(self, request: "Request", num_cached_tokens: int) -> tuple[int | None, bool]:
        """How many tokens it can load behind the cached ones (None: ask again), and whether beside the steps."""
        try:
            num_tokens, is_async = self._connector.get_num_new_matched_tokens(request, num_cached_tokens)
        except Exception:
            self._fail(request, "look it up")
            return None, False
        if num_tokens is None:
            return None, False
        if num_tokens < 0:
            logger.error("The KV connector offers %d tokens to request %s.", num_tokens, request.request_id)
            return 0, False
        return int(num_tokens), bool(is_async)

    def accept(self, request: "Request", table: tuple[list[int], ...], num_cached_tokens: int, num_tokens: int) -> None:
        """The request has its blocks; `num_tokens` behind the cached ones are to be loaded into them."""
        req_id = request.request_id
        self._expected.discard(req_id)
        blocks = allocated_blocks(
            table, num_cached_tokens, self._block_tokens, request.block_hashes, self._hash_block_tokens
        )
        try:
            self._connector.update_state_after_alloc(request, blocks, num_tokens)
        except Exception:
            self._fail(request, "take its blocks")
            return
        if req_id in self._loaded:
            self._loaded.discard(req_id)
            return
        num_queried = request.num_tokens - num_cached_tokens
        if num_queried == 0:
            return
        is_repeated = request.num_preemptions > 0
        sources = None
        if num_tokens and not is_repeated:
            sources = self._connector.get_external_cache_hit_sources(request, num_tokens)
        self._statistics.record(num_queried, num_tokens, preempted=is_repeated, hits_by_source=sources)

    def _fail(self, request: "Request", what: str) -> None:
        logger.exception("The KV connector failed to %s: request %s.", what, request.request_id)
        if request not in self.failed:
            self.failed.append(request)

    def started(self, requests: "Iterable[Request]") -> None:
        """Loads that the last plan began."""
        for request in requests:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            self.loading.add(request.request_id)
            self._loaded.add(request.request_id)

    def forget(self, req_id: str) -> bool:
        """The request ended; whether its load is in flight."""
        self._expected.discard(req_id)
        self._loaded.discard(req_id)
        was_loading = req_id in self.loading
        self.loading.discard(req_id)
        return was_loading

    def take_failed(self) -> "list[Request]":
        """Requests about which the connector raised since the last call."""
        failed, self.failed = self.failed, []
        return failed

    def note_reset(self) -> None:
        """The connector's cache was reset: hit rates start anew."""
        self._statistics.reset = True

    def take_statistics(self) -> PrefixCacheStats:
        """Tokens asked for and found since the last call."""
        statistics, self._statistics = self._statistics, PrefixCacheStats()
        return statistics

    def stages(self, num_holding: int) -> dict[str, int]:
        """Requests by stage of their load.

        Args:
            num_holding: waiting requests that hold KV.
        """
        return {
            KV_FETCH_WAITING_TO_START: len(self._expected),
            KV_FETCH_IN_PROGRESS: len(self.loading),
            KV_FETCH_COMPLETED_WAITING: max(0, num_holding - len(self.loading)),
        }
