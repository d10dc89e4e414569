# SPDX-License-Identifier: Apache-2.0
"""Sessions with streaming input (vLLM's resumable requests): chunks of input that wait for the end of the turn before."""

from collections import deque
from typing import TYPE_CHECKING

from tokenspeed_plugin.host.names import RequestStatus
from tokenspeed_plugin.scheduler_fsm import _core, outcomes, request_import

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenspeed_plugin.host.names import Request
    from tokenspeed_plugin.scheduler_fsm.outbox import ClientOutbox
    from tokenspeed_plugin.scheduler_fsm.policies import QueueOrder
    from tokenspeed_plugin.scheduler_fsm.request_mirror import RequestMirror

_NO_MEDIA = "a chunk of streaming input may hold text only under the tokenspeed scheduler; start vLLM with `--scheduler vllm` for media"


class SessionDesk:
    """Feeds sessions turn by turn.

    A chunk and the end of a session arrive as requests under the session's id; the end is the one that is not resumable.
    What arrives while a turn is under way waits here.
    """

    def __init__(
        self,
        core: _core.Core,
        handles: dict[str, int],
        prompts: request_import.PromptImporter,
        mirror: "RequestMirror",
        outbox: "ClientOutbox",
        end: "Callable[[str, RequestStatus], object]",
        *,
        rows_carry_masks: bool = False,
        order: "QueueOrder | None" = None,
    ) -> None:
        """Set whom it works with.

        Args:
            core: holds the requests.
            handles: of the requests, by id.
            prompts: reads chunks.
            mirror: keeps vLLM's requests in step.
            outbox: takes ends that no step reports.
            end: ends a request from outside and forgets it.
            rows_carry_masks: whether each row's output carries more than tokens (`--return-sampling-mask`).
            order: of the queue; None for ours.
        """
        self._order = order
        self._core = core
        self._handles = handles
        self._prompts = prompts
        self._mirror = mirror
        self._outbox = outbox
        self._end = end
        self._rows_carry_masks = rows_carry_masks
        self._inputs: dict[str, deque[Request]] = {}
        # Ended before their clients said so. Until these do, their chunks must not open new sessions.
        self._broken: set[str] = set()

    def _is_plain(self, request: "Request") -> bool:
        return request_import.is_plain(request) and not self._rows_carry_masks

    def owns(self, req_id: str) -> bool:
        """Whether a request under this id belongs to a session that was opened before."""
        return req_id in self._inputs or req_id in self._broken

    def open(self, session: "Request") -> None:
        """The first chunk of a session was taken in."""
        self._inputs[session.request_id] = deque()

    def take(self, session: "Request | None", message: "Request") -> None:
        """A chunk, or the end of the input.

        Args:
            session: None when it broke earlier.
            message: the chunk; the end when it is not resumable.
        """
        if session is None:
            self._answer_broken(message)
        elif session.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            self._inputs[session.request_id].append(message)
        elif message.resumable:
            self._feed(session, message)
        else:
            self._end(session.request_id, RequestStatus.FINISHED_ABORTED)

    def next_turn(self, session: "Request") -> bool:
        """A request's output ended. A session goes on, with input that has waited or when there is some.

        Returns:
            False when the request is no session, or ends with this turn.
        """
        inputs = self._inputs.get(session.request_id)
        if inputs is None or session.status == RequestStatus.FINISHED_ERROR:
            return False
        if inputs and not inputs[0].resumable:
            del self._inputs[session.request_id]
            self._core.finish(self._handles[session.request_id], outcomes.REASON[session.status])
            return False
        session.status = RequestStatus.WAITING_FOR_STREAMING_REQ
        session.stop_reason = None
        if inputs:
            self._feed(session, inputs.popleft())
        return True

    def close(self, session: "Request") -> None:
        """A request is gone. Chunks of a session that nobody will compute any more are answered."""
        inputs = self._inputs.pop(session.request_id, None)
        if inputs is None or session.status == RequestStatus.FINISHED_ABORTED:
            return
        self._broken.add(session.request_id)
        for message in inputs:
            self._answer_broken(message)

    def abandon(self, req_id: str) -> None:
        """Its client is gone: nothing more comes from there."""
        self._broken.discard(req_id)

    def _answer_broken(self, message: "Request") -> None:
        if message.resumable:
            error = f"session {message.request_id!r} has ended; open a new one"
            self._outbox.close(message, RequestStatus.FINISHED_ERROR, error)
        else:
            self._broken.discard(message.request_id)

    def _feed(self, session: "Request", chunk: "Request") -> None:
        has_grammar = session.structured_output_request is not None
        try:
            if chunk.mm_features:
                raise _core.RefusedRequest(_NO_MEDIA)
            token_ids = self._core.feed(
                self._handles[session.request_id],
                chunk=self._prompts.take(chunk),
                stop=request_import.stop_rules(chunk),
                arrival_time_s=chunk.arrival_time,
                is_plain=self._is_plain(chunk) and self._is_plain(session),
                has_grammar=has_grammar,
                rank=None if self._order is None else self._order.rank(chunk),
            )
        except (_core.RefusedRequest, ValueError, TypeError, OverflowError) as refusal:
            # The client knows all of it by one id, so the session is what fails.
            self._end(session.request_id, RequestStatus.FINISHED_ERROR)
            self._outbox.close(session, RequestStatus.FINISHED_ERROR, str(refusal))
            return
        self._mirror.fed(session, chunk, token_ids)
