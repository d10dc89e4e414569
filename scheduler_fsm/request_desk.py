# SPDX-License-Identifier: Apache-2.0
"""Requests on their way in and out: the one place that pairs vLLM's requests with those of the core."""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tokenspeed_plugin.host.log import logger as named_logger
from tokenspeed_plugin.host.names import RequestStatus
from tokenspeed_plugin.scheduler_fsm import _core, outcomes, request_import
from tokenspeed_plugin.scheduler_fsm.outcomes import OVER_CAPACITY
from tokenspeed_plugin.scheduler_fsm.rate_wish import wished_tps
from tokenspeed_plugin.scheduler_fsm.session_desk import SessionDesk
from tokenspeed_plugin.scheduler_fsm.session_hints import SessionNames, session_hints

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import KVConnectorOutput, Request
    from tokenspeed_plugin.scheduler_fsm.connector_port import ConnectorPort
    from tokenspeed_plugin.scheduler_fsm.draft_metrics import DraftMetrics
    from tokenspeed_plugin.scheduler_fsm.grammar_gate import GrammarGate
    from tokenspeed_plugin.scheduler_fsm.outbox import ClientOutbox
    from tokenspeed_plugin.scheduler_fsm.policies import QueueOrder
    from tokenspeed_plugin.scheduler_fsm.request_mirror import RequestMirror

logger = named_logger(__name__)


_NO_SESSIONS = (
    "streaming-input sessions cannot be served together with a KV connector; leave out `--kv-transfer-config` for them"
)
_NO_ROOM = "the server has no room for one more user at the rate that it keeps (--target-overload refuse); retry later or elsewhere"


class RequestDesk:
    """Takes requests in, ends them, and remembers whom the workers and clients are still to be told of."""

    def __init__(
        self,
        core: _core.Core,
        prompts: request_import.PromptImporter,
        grammars: "GrammarGate",
        mirror: "RequestMirror",
        outbox: "ClientOutbox",
        draft_metrics: "DraftMetrics",
        port: "ConnectorPort | None" = None,
        *,
        rows_carry_masks: bool = False,
        has_states: bool = False,
        order: "QueueOrder | None" = None,
    ) -> None:
        """Set whom it works with.

        Args:
            rows_carry_masks: whether each row's output carries more than tokens (`--return-sampling-mask`).
            has_states: whether the model has layers that keep states.
            order: of the queue; None for ours.
        """
        self.requests: dict[str, Request] = {}
        self.handles: dict[str, int] = {}
        self._core = core
        self._prompts = prompts
        self._grammars = grammars
        self._mirror = mirror
        self._outbox = outbox
        self._port = port
        self._draft_metrics = draft_metrics
        self.sessions = SessionDesk(
            core, self.handles, prompts, mirror, outbox, self.finish, rows_carry_masks=rows_carry_masks, order=order
        )
        self._order = order
        self._rows_carry_masks = rows_carry_masks
        self.has_states = has_states
        self.session_names: SessionNames | None = None
        # Told to the workers with the next plan.
        self._finished_req_ids: set[str] = set()
        self._preempted_req_ids: set[str] = set()

    def __bool__(self) -> bool:
        """Whether workers or clients are still to be told that a request ended."""
        return bool(self._finished_req_ids or self._outbox)

    # -- in and out ------------------------------------------------------------------------------------------------------------

    def add(self, request: "Request") -> None:
        """Take a request in. One that can never run ends with the next outputs.

        Raises:
            ValueError: its id is in use.
        """
        req_id = request.request_id
        if self.sessions.owns(req_id):
            self.sessions.take(self.requests.get(req_id), request)
            return
        if request.resumable and self._port is not None:
            self._outbox.close(request, RequestStatus.FINISHED_ERROR, _NO_SESSIONS)
            return
        if req_id in self.requests or (self._port is not None and self._port.is_draining(req_id)):
            msg = f"request id {req_id!r} is in use; ids must be unique among running requests"
            raise ValueError(msg)
        self._draft_metrics.open(request)
        if self._port is not None:
            self._port.new_request(request)
        try:
            self.handles[req_id] = self._submit(request)
        except (_core.RefusedRequest, ValueError, TypeError, OverflowError) as refusal:
            self._outbox.close(request, RequestStatus.FINISHED_ERROR, str(refusal))
            if self._port is not None:
                self._port.refused(request)
                self._finished_req_ids.add(req_id)
            return
        self.requests[req_id] = request
        if request.resumable:
            self.sessions.open(request)
        if request.structured_output_request is not None:
            self._grammars.hold(request)
        self._mirror.queued(request)

    def _submit(self, request: "Request") -> int:
        has_grammar = request.structured_output_request is not None
        hints = session_hints(request)
        if self.session_names is not None and request.session_id:
            self.session_names.note(hints.session, request.session_id)
        return self._core.submit(
            req_id=request.request_id,
            request=request,
            prompt=self._prompts.take(request),
            stop=request_import.stop_rules(request),
            client_index=request.client_index,
            priority=request.priority,
            arrival_time_s=request.arrival_time,
            adapter=request_import.adapter_number(request),
            may_read_cache=not request.skip_reading_prefix_cache,
            ready=not has_grammar,
            is_plain=request_import.is_plain(request) and not self._rows_carry_masks,
            has_grammar=has_grammar,
            hints=hints,
            is_session=request.resumable,
            target_tps=wished_tps(request),
            rank=None if self._order is None else self._order.rank(request),
        )

    def finish(self, request_ids: str | Iterable[str] | None, status: RequestStatus) -> "list[Request]":
        """End requests from outside (client gone, stop string found); None ends all, unknown ids are ignored.

        Returns:
            The requests that this call ended.
        """
        if request_ids is None:
            request_ids = list(self.requests)
        elif isinstance(request_ids, str):
            request_ids = [request_ids]
        else:
            request_ids = list(request_ids)
        for req_id in request_ids:
            self.sessions.abandon(req_id)
        ended = [self.requests[req_id] for req_id in dict.fromkeys(request_ids) if req_id in self.requests]
        for request in ended:
            self._core.finish(self.handles[request.request_id], outcomes.REASON[status])
            request.status = status
            self.forget(request)
        return ended

    def forget(self, request: "Request") -> dict[str, Any] | None:
        """Drop what is kept of a request that ended, with its final status set, and tell workers and clients.

        Returns:
            A connector's parameters for its client.
        """
        req_id = request.request_id
        params = None
        if self._port is None:
            self._core.release(self.handles[req_id])
        else:
            params = self._port.ended(request, self.handles[req_id])
        del self.requests[req_id]
        del self.handles[req_id]
        self.sessions.close(request)
        self._grammars.drop(req_id)
        self._finished_req_ids.add(req_id)
        self._outbox.note_finished(request)
        return params

    def end_output(self, request: "Request") -> dict[str, Any] | None:
        """The output of a request ended, or that of a session's turn.

        Returns:
            A connector's parameters for its client.
        """
        if not self.sessions.next_turn(request):
            return self.forget(request)
        if self.has_states:
            # Its KV went with the turn.
            self._preempted_req_ids.add(request.request_id)
        return None

    # -- what happens around a step --------------------------------------------------------------------------------------------

    def open_grammar_gates(self) -> None:
        """Let requests go on whose grammar is there; end those whose grammar failed."""
        ready, failed = self._grammars.poll()
        for request in ready:
            request.status = RequestStatus.WAITING
            self._core.open_gate(self.handles[request.request_id])
        for request, message in failed:
            self.fail(request, message)

    def note_changes(self, plan: _core.PlanColumns) -> None:
        """Keep vLLM's requests and the workers informed of what happens rarely."""
        now_s = time.monotonic()
        self.note_preemptions(plan.retracted, now_s)
        for request, num_cached_tokens, num_loaded_tokens in plan.admitted:
            self._mirror.admitted(request, num_cached_tokens, num_loaded_tokens, now_s)
        for request in plan.ended:
            logger.warning("Request %s ends: it fills the whole KV cache alone.", request.request_id)
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            self.forget(request)
            self._outbox.close(request, RequestStatus.FINISHED_LENGTH_CAPPED)
        for request in plan.refused:
            request.status = RequestStatus.FINISHED_ERROR
            self.forget(request)
            self._outbox.close(request, RequestStatus.FINISHED_ERROR, _NO_ROOM, code=OVER_CAPACITY)

    def note_preemptions(self, requests: "list[Request]", now_s: float) -> None:
        """These lost their KV.

        Args:
            requests: that wait again.
            now_s: monotonic clock.
        """
        for request in requests:
            self._mirror.preempted(request, now_s)
            self._preempted_req_ids.add(request.request_id)

    def note_session_rows(self, plan: _core.PlanColumns) -> None:
        """A session's turn starts from states in other columns than the last one ended in: workers must look for them anew."""
        self._preempted_req_ids.update(row[0].request_id for row in plan.new_rows if row[0].resumable)

    def take_failed_loads(self, port: "ConnectorPort", output: "KVConnectorOutput | None") -> None:
        """Requests whose KV did not come compute it themselves, or end; before the step's results are taken in.

        Args:
            port: of the connector.
            output: what its workers report with a step.
        """
        for request in port.offers.take_failed():
            self.fail(request, f"the KV connector failed on request {request.request_id}; the log has the reason")
        if output is None or not (output.invalid_block_ids or output.failed_recving):
            return
        affected, loading = port.failed_loads(output, self.requests, self.handles)
        if port.recomputes_failed_loads:
            for request in affected:
                self._core.recompute(self.handles[request.request_id])
            self.note_preemptions(affected, time.monotonic())
            return
        for request in [*affected, *loading]:
            self.fail(
                request, f"the KV of request {request.request_id} could not be loaded (kv_load_failure_policy=fail)"
            )

    def fail(self, request: "Request", message: str) -> None:
        """End a request with an error; nothing happens when it has ended."""
        if self.finish(request.request_id, RequestStatus.FINISHED_ERROR):
            self._outbox.close(request, RequestStatus.FINISHED_ERROR, message)

    def take_notices(self) -> tuple[set[str], set[str]]:
        """Ids of requests that ended and that were preempted since the last call, for the workers."""
        finished, self._finished_req_ids = self._finished_req_ids, set()
        preempted, self._preempted_req_ids = self._preempted_req_ids, set()
        return finished, preempted
