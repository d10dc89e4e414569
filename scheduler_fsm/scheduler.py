# SPDX-License-Identifier: Apache-2.0
"""vLLM's SchedulerInterface over the C++ core.

The core decides; this adapter translates. Rows that carry nothing but tokens never reach Python code: their outputs are built in C++.
"""

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tokenspeed_plugin.host import config_gate, patches
from tokenspeed_plugin.host.differences import num_hash_lookahead_tokens
from tokenspeed_plugin.host.log import logger as named_logger
from tokenspeed_plugin.host.names import (
    MULTIMODAL_REGISTRY,
    EngineCoreOutput,
    EngineCoreOutputs,
    PauseState,
    SchedulerInterface,
)
from tokenspeed_plugin.scheduler_fsm import _core, config_map, connector_port, pace, policies, request_import
from tokenspeed_plugin.scheduler_fsm.capacity_report import log_capacity
from tokenspeed_plugin.scheduler_fsm.draft_intake import DraftIntake
from tokenspeed_plugin.scheduler_fsm.draft_metrics import DraftMetrics
from tokenspeed_plugin.scheduler_fsm.grammar_gate import GrammarGate
from tokenspeed_plugin.scheduler_fsm.kv_event_feed import KvEventFeed
from tokenspeed_plugin.scheduler_fsm.kv_map_source import KvMapSource
from tokenspeed_plugin.scheduler_fsm.outbox import ClientOutbox
from tokenspeed_plugin.scheduler_fsm.request_desk import RequestDesk
from tokenspeed_plugin.scheduler_fsm.request_mirror import RequestMirror
from tokenspeed_plugin.scheduler_fsm.row_outputs import RowOutputs
from tokenspeed_plugin.scheduler_fsm.statistics import Statistics
from tokenspeed_plugin.scheduler_fsm.step_output import scheduler_output
from tokenspeed_plugin.scheduler_fsm.steps_in_flight import StepsInFlight

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import (
        DraftTokenIds,
        GrammarOutput,
        KVCacheConfig,
        KVConnectorBase_V1,
        KVEventsConfig,
        ModelRunnerOutput,
        MultiModalRegistry,
        Request,
        RequestStatus,
        SchedulerOutput,
        SchedulerStats,
        StructuredOutputManager,
        VllmConfig,
    )

logger = named_logger(__name__)

_PAUSE = {
    PauseState.UNPAUSED: _core.PauseLevel.NONE,
    PauseState.PAUSED_NEW: _core.PauseLevel.NEW,
    PauseState.PAUSED_ALL: _core.PauseLevel.ALL,
}


class TokenSpeedScheduler(SchedulerInterface):
    """The scheduler that `--scheduler tokenspeed` selects."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        structured_output_manager: "StructuredOutputManager",
        block_size: int,
        hash_block_size: int | None = None,
        mm_registry: "MultiModalRegistry" = MULTIMODAL_REGISTRY,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        """Build the core for vLLM's configuration.

        Raises:
            ConfigRefusedError: names each setting that it cannot honour.
        """
        config_gate.check(vllm_config, kv_cache_config)
        hash_tokens = hash_block_size or block_size
        key_tokens = config_map.key_tokens(kv_cache_config, hash_tokens)
        config = config_map.scheduler_config(vllm_config, kv_cache_config, key_tokens, mm_registry)
        log_capacity(config.kv, kv_cache_config, config.max_model_tokens, drops_last=config.drop_last_match_block)
        self._core = _core.Core(
            config=config,
            protocol=config_map.runner_protocol(vllm_config, kv_cache_config),
            output_class=EngineCoreOutput,
        )
        self._port = port = connector_port.create(self._core, vllm_config, kv_cache_config, hash_tokens)
        # EngineCore reads both; None says "no connector".
        self.connector = None if port is None else port.connector
        self.ec_connector = None
        caching = bool(vllm_config.cache_config.enable_prefix_caching)
        prompts = request_import.PromptImporter(key_tokens if caching else 0, num_hash_lookahead_tokens(vllm_config))
        hasher = prompts.hasher if port is None else prompts.hasher_beside_vllm
        patches.install_block_hasher(hasher, vllm_config, has_connector=port is not None)
        self._grammars = GrammarGate(structured_output_manager)
        self._outbox = ClientOutbox(include_finished_set=include_finished_set)
        draft_metrics = DraftMetrics(vllm_config)
        mirror = RequestMirror(log_stats=log_stats)
        masks = bool(vllm_config.model_config.return_sampling_mask)
        self._desk = RequestDesk(
            self._core,
            prompts,
            self._grammars,
            mirror,
            self._outbox,
            draft_metrics,
            port,
            rows_carry_masks=masks,
            has_states=any(group.retention == _core.Retention.STATE for group in config.kv.groups),
            order=policies.install(self._core),
        )
        self.requests = self._desk.requests
        self._drafts = DraftIntake(self._core, self.requests, self._desk.handles, self._grammars)
        self._rows = RowOutputs(
            self._core,
            self._grammars,
            draft_metrics,
            key_tokens if caching else 0,
            returns_masks=masks,
            mirrors_tokens=port is not None,
        )
        self._kv_map = KvMapSource(self._core, self._desk, kv_cache_config, key_tokens)
        self._steps = StepsInFlight()
        self._events = KvEventFeed(vllm_config)
        self._statistics = Statistics(self._core, vllm_config) if log_stats else None
        self._pause_state = PauseState.UNPAUSED
        self._pace = pace.Pace(self._core, self._statistics, vllm_config.additional_config)

    # -- requests in and out ---------------------------------------------------------------------------------------------------

    def add_request(self, request: "Request") -> None:
        """Take a request in. One that can never run ends with the next outputs; the engine goes on."""
        self._desk.add(request)
        self._pace.start_when_asked()

    def has_request(self, request_id: str) -> bool:
        """Whether the scheduler holds the request."""
        return request_id in self.requests

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: "RequestStatus"
    ) -> "list[Request]":
        """End requests from outside (client gone, stop string found); unknown ids are ignored.

        Returns:
            The requests that this call ended.
        """
        return self._desk.finish(request_ids, finished_status)

    # -- steps -----------------------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> "SchedulerOutput":
        """Plan the next step."""
        self._desk.open_grammar_gates()
        plan = self._core.plan(_PAUSE[self._pause_state], throttle_prefills, self._pace.now_s())
        if plan.retracted or plan.admitted or plan.ended or plan.refused:
            self._desk.note_changes(plan)
        if self._desk.has_states and plan.new_rows:
            self._desk.note_session_rows(plan)
        output = scheduler_output(plan, *self._desk.take_notices())
        if self._port is not None:
            self._port.describe_step(output, plan, self.requests, self._desk.handles)
        self._steps.add(output, plan)
        return output

    def get_grammar_bitmask(self, scheduler_output: "SchedulerOutput") -> "GrammarOutput | None":
        """Masks for the rows of this step that sample under a grammar."""
        if not scheduler_output.has_structured_output_requests:
            return None
        req_ids = self._steps.grammar_req_ids(scheduler_output)
        return self._grammars.bitmask(self.requests, req_ids, scheduler_output.scheduled_spec_decode_tokens)

    def update_from_output(
        self,
        scheduler_output: "SchedulerOutput",
        model_runner_output: "ModelRunnerOutput",
    ) -> dict[int, EngineCoreOutputs]:
        """Take in what a step produced; returns what each client gets."""
        outputs: dict[int, list[EngineCoreOutput]] = {}
        drafts = None
        port, transferred = self._port, model_runner_output.kv_connector_output
        if port is not None:
            self._desk.take_failed_loads(port, transferred)
        step = self._steps.take(scheduler_output)
        if step is not None:
            delivered = self._core.advance(
                step,
                model_runner_output.sampled_token_ids or [],
                model_runner_output.req_ids,
                model_runner_output.req_id_to_index,
                bool(model_runner_output.num_nans_in_logits),
                self._pace.now_s(),
            )
            if delivered is not None:
                outputs, special, drafts = delivered
                if port is not None:
                    connector_port.mirror_tokens(self.requests, outputs.values())
                num_invalid_drafts = scheduler_output.num_invalid_spec_tokens
                for request, output in self._rows.build(special, model_runner_output, num_invalid_drafts):
                    outputs.setdefault(request.client_index, []).append(output)
                    if output.finish_reason is not None:
                        output.kv_transfer_params = self._desk.end_output(request)
        if port is not None and transferred is not None:
            port.take_reports(transferred, self._desk.handles)
        self._events.publish(self._core, () if port is None else port.take_events())
        by_client = self._outbox.collect(outputs)
        if self._statistics is not None:
            # One front end is enough; without outputs the first one gets the report.
            if not by_client:
                by_client[0] = EngineCoreOutputs()
            next(iter(by_client.values())).scheduler_stats = self._statistics.report(
                model_runner_output.cudagraph_stats,
                drafts,
                scheduler_output,
                None if port is None else port.statistics(transferred),
            )
        return by_client

    def update_draft_token_ids(self, draft_token_ids: "DraftTokenIds") -> None:
        """Set what the next step verifies."""
        self._drafts.set(draft_token_ids)

    def update_draft_token_ids_in_output(
        self,
        draft_token_ids: "DraftTokenIds",
        scheduler_output: "SchedulerOutput",
    ) -> None:
        """Put drafts that the workers proposed meanwhile in place of a planned step's placeholders."""
        self._drafts.fill(draft_token_ids, scheduler_output)

    # -- state -----------------------------------------------------------------------------------------------------------------

    def get_num_unfinished_requests(self) -> int:
        """Requests that steps would bring on; none while everything is paused."""
        if self._pause_state == PauseState.PAUSED_ALL:
            return 0
        if self._pause_state == PauseState.PAUSED_NEW:
            # Requests that hold KV go on, queued ones stay.
            return self._core.num_running + self._core.num_holding_waiting
        return self._core.num_running + self._core.num_waiting - self._core.num_awaiting_input

    def has_finished_requests(self) -> bool:
        """Whether workers or clients are still to be told that a request ended, or a connector still uses its blocks."""
        return bool(self._desk) or self._core.num_draining > 0

    def has_requests(self) -> bool:
        """Whether the engine must go on stepping."""
        return super().has_requests() or (self._port is not None and self._port.has_push_work())

    def get_kv_connector(self) -> "KVConnectorBase_V1 | None":
        """The KV connector in its scheduler role, or None."""
        return self.connector

    @property
    def pause_state(self) -> PauseState:
        """What is scheduled at present."""
        return self._pause_state

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause admissions, or everything, or go on."""
        logger.info("Scheduler pause state: %s", pause_state.name)
        self._pause_state = pause_state

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes.

        Args:
            reset_running_requests: first take the KV of running requests away; they are computed again.
            reset_connector: also forget what a connector stored.

        Returns:
            False while blocks are in use, or when the connector could not.
        """
        if reset_running_requests:
            self._desk.note_preemptions(self._core.retract_all(), time.monotonic())
        done = self._core.reset_prefix_cache()
        if done and self._statistics is not None:
            self._statistics.note_reset()
        if reset_connector and self._port is not None:
            done = self._port.reset_cache() and done
        return done

    def reset_encoder_cache(self) -> None:
        """Forget all encoder outputs; the workers forget theirs by themselves."""
        self._core.reset_encoder_cache()

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        return self._core.num_running, self._core.num_waiting

    def get_kv_cache_usage(self) -> float:
        """Share of the KV cache that requests hold, 0 to 1."""
        return self._core.kv_usage

    def make_stats(self) -> "SchedulerStats | None":
        """A report for vLLM's loggers; None when statistics are off."""
        if self._statistics is None:
            return None
        return self._statistics.report(connector=None if self._port is None else self._port.statistics(None))

    def get_kv_event_publisher_config(self) -> "KVEventsConfig | None":
        """Where KV events are published."""
        return self._events.publisher_config()

    def use_clock(self, clock_s: Callable[[], float]) -> None:
        """Measure steps by another clock, in seconds: for simulations. Nothing is measured without a rate per user."""
        self._pace.use_clock(clock_s)

    def pace(self) -> dict[str, float]:
        """The step-time model, its error, and what the rate per user limited so far."""
        return self._core.pace()

    def kv_map(self) -> dict[str, Any]:
        """A snapshot of the block pool. O(pool): for pictures."""
        return self._kv_map.take()

    def check_integrity(self) -> None:
        """Raise RuntimeError naming the first broken invariant of queues and blocks. O(pool): for tests and idle times."""
        self._core.check_integrity()

    def shutdown(self) -> None:
        """Stop publishing KV events, and the connector."""
        self._pace.close()
        self._events.shutdown()
        if self._port is not None:
            self._port.shutdown()
