# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of a vLLM KV connector: every call that it expects, at its time."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tokenspeed_plugin.host.log import logger as named_logger
from tokenspeed_plugin.host.names import (
    KVConnectorBlockState,
    KVConnectorFactory,
    KVConnectorRole,
    SupportsHMA,
)
from tokenspeed_plugin.kv_flat.pool_facade import BlockPoolFacade, KvManagerFacade
from tokenspeed_plugin.scheduler_fsm.connector_offers import ConnectorOffers

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import KVCacheConfig, KVConnectorOutput, Request, SchedulerOutput, VllmConfig
    from tokenspeed_plugin.scheduler_fsm._core import Core, PlanColumns

logger = named_logger(__name__)


class ConnectorPort:
    """One connector in its scheduler role, and the requests whose KV it moves."""

    def __init__(
        self, core: "Core", vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", hash_block_tokens: int
    ) -> None:
        """Create the connector that vLLM's configuration names.

        Args:
            core: that decides; it asks the connector during admission.
            vllm_config: with `kv_transfer_config` set.
            kv_cache_config: vLLM's groups and number of blocks.
            hash_block_tokens: tokens behind one of vLLM's block hashes.

        Raises:
            ValueError: the connector wants one KV cache group and there are more.
        """
        self._core = core
        self.connector: Any = KVConnectorFactory.create_connector(
            config=vllm_config, role=KVConnectorRole.SCHEDULER, kv_cache_config=kv_cache_config
        )
        self._num_groups = num_groups = len(kv_cache_config.kv_cache_groups)
        self._knows_groups = isinstance(self.connector, SupportsHMA)
        if not self._knows_groups and num_groups > 1:
            msg = (
                f"kv_transfer_config.kv_connector={vllm_config.kv_transfer_config.kv_connector!r} takes one KV cache "
                f"group, the model has {num_groups}; add `--disable-hybrid-kv-cache-manager`"
            )
            raise ValueError(msg)
        pool = BlockPoolFacade(core, kv_cache_config.num_blocks, hash_block_tokens)
        self.connector.bind_kv_cache_manager(KvManagerFacade(pool))
        block_tokens = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        self.offers = ConnectorOffers(self.connector, block_tokens, hash_block_tokens)
        self.recomputes_failed_loads = vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
        core.attach_connector(
            offer=self.offers.offer,
            accept=self.offers.accept,
            needs_delivery=bool(self.connector.requires_kv_delivery),
        )
        # Ended requests whose blocks the connector still uses.
        self._draining: dict[str, int] = {}

    # -- requests --------------------------------------------------------------------------------------------------------------

    def new_request(self, request: "Request") -> None:
        """A request arrived. The connector may change it, so the core must not have seen it."""
        self.connector.on_new_request(request)
        self.offers.expect(request)

    def is_draining(self, req_id: str) -> bool:
        """Whether an ended request of this id still holds blocks."""
        return req_id in self._draining

    def ended(self, request: "Request", handle: int) -> dict[str, Any] | None:
        """A request ended, with its final status set: tell the connector, and give its blocks back unless it sends them.

        Returns:
            Transfer parameters for the client.
        """
        is_loading = self.offers.forget(request.request_id)
        request.num_computed_tokens, table = self._core.computed(handle)
        awaits_send, params = self._finished(request, table)
        self._core.let_go(handle, awaits_send)
        if awaits_send or is_loading:
            self._draining[request.request_id] = handle
        return params

    def refused(self, request: "Request") -> None:
        """A request was refused after the connector had seen it."""
        self.offers.forget(request.request_id)
        self._finished(request, tuple([] for _ in range(self._num_groups)))

    def _finished(self, request: "Request", table: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        try:
            if self._knows_groups:
                answer = self.connector.request_finished_all_groups(request, table)
            else:
                answer = self.connector.request_finished(request, table[0])
        except Exception:
            logger.exception("Request %s ended; the KV connector failed to take note.", request.request_id)
            return False, None
        awaits_send, params = answer
        return bool(awaits_send), params

    # -- steps -----------------------------------------------------------------------------------------------------------------

    def describe_step(
        self, output: "SchedulerOutput", plan: "PlanColumns", requests: "dict[str, Request]", handles: dict[str, int]
    ) -> None:
        """Put the connector's message to its workers into a step.

        Connectors read how far each request was computed before the step, and others read it behind it.
        """
        self.offers.started(plan.prefetching)
        output.has_sync_kv_loads = plan.has_sync_loads
        for request, _, num_computed_tokens, _ in plan.new_rows:
            request.num_computed_tokens = num_computed_tokens
        for req_id, num_computed_tokens in zip(plan.req_ids, plan.num_computed_tokens, strict=True):
            requests[req_id].num_computed_tokens = num_computed_tokens
        output.kv_connector_block_state = KVConnectorBlockState(
            req_ids=set(plan.num_scheduled_tokens),
            resolve_block_ids=lambda req_id: self._core.block_ids(handles[req_id]),
            boundary_state_offloads={},
        )
        output.kv_connector_metadata = self.connector.build_connector_meta(output)
        output.kv_connector_block_state = None
        for req_id, num_tokens in plan.num_scheduled_tokens.items():
            requests[req_id].num_computed_tokens += num_tokens

    def failed_loads(
        self, output: "KVConnectorOutput", requests: "dict[str, Request]", handles: dict[str, int]
    ) -> "tuple[list[Request], list[Request]]":
        """Blocks and requests whose load failed, before the step's results are taken in.

        Returns:
            Running requests that read what never came, and requests whose load in flight will be incomplete.
        """
        for req_id in output.failed_recving or ():
            if req_id in handles:
                self._core.fail_load(handles[req_id])
        affected = self._core.invalidate(list(output.invalid_block_ids)) if output.invalid_block_ids else []
        loading = [requests[req_id] for req_id in self.offers.loading if self._core.has_failed_load(handles[req_id])]
        return affected, loading

    def take_reports(self, output: "KVConnectorOutput", handles: dict[str, int]) -> None:
        """What the connector's workers finished, after the step's results were taken in."""
        self.connector.update_connector_output(output)
        for req_id in output.finished_recving or ():
            handle = handles.get(req_id, self._draining.get(req_id))
            self.offers.loading.discard(req_id)
            self._report(req_id, "receiving", handle is not None and self._core.load_done(handle))
        for req_id in output.finished_sending or ():
            handle = self._draining.get(req_id)
            self._report(req_id, "sending", handle is not None and self._core.send_done(handle))

    def _report(self, req_id: str, what: str, is_expected: bool) -> None:
        if not is_expected:
            logger.warning(
                "The KV connector reports that it finished %s request %s; nobody waits for it.", what, req_id
            )
        handle = self._draining.get(req_id)
        if handle is not None and not self._core.is_draining(handle):
            del self._draining[req_id]

    def has_push_work(self) -> bool:
        """Whether the connector needs steps although no request does."""
        return bool(self.connector.has_pending_push_work())

    # -- books -----------------------------------------------------------------------------------------------------------------

    def take_events(self) -> list[Any]:
        """KV events of the connector's own tiers since the last call."""
        return list(self.connector.take_events() or ())

    def statistics(self, output: "KVConnectorOutput | None") -> dict[str, Any]:
        """The connector's part of vLLM's SchedulerStats."""
        stats = None if output is None else output.kv_connector_stats
        own = self.connector.get_kv_connector_stats()
        if own is not None and not own.is_empty():
            stats = own if stats is None else stats.aggregate(own)
        return {
            "kv_connector_stats": None if stats is None else stats.to_dict(),
            "connector_prefix_cache_stats": self.offers.take_statistics(),
            "num_kv_fetch_reqs_by_stage": self.offers.stages(self._core.num_holding_waiting),
        }

    def reset_cache(self) -> bool:
        """Forget what the connector has stored; False when it could not."""
        if self.connector.reset_cache() is False:
            return False
        self.offers.note_reset()
        return True

    def shutdown(self) -> None:
        """Stop the connector."""
        self.connector.shutdown()


def create(
    core: "Core", vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", hash_block_tokens: int
) -> ConnectorPort | None:
    """The port of the configured connector, None without one."""
    if vllm_config.kv_transfer_config is None:
        return None
    return ConnectorPort(core, vllm_config, kv_cache_config, hash_block_tokens)


def mirror_tokens(requests: "dict[str, Request]", outputs: Iterable[list[Any]]) -> None:
    """Append delivered tokens to vLLM's requests, where connectors read ids and block hashes."""
    for rows in outputs:
        for row in rows:
            requests[row.request_id].append_output_token_ids(row.new_token_ids)
