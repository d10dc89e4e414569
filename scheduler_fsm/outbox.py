# SPDX-License-Identifier: Apache-2.0
"""What clients are still to be told, beside the tokens of a step."""

from collections import defaultdict
from typing import TYPE_CHECKING

from tokenspeed_plugin.host.log import logger as named_logger
from tokenspeed_plugin.host.names import EngineCoreOutput, EngineCoreOutputs, RequestStatus
from tokenspeed_plugin.scheduler_fsm.outcomes import INVALID_REQUEST, closing_output

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import Request

logger = named_logger(__name__)


class ClientOutbox:
    """Collects ends that no model step reports (refusals, failures, cuts), and who finished."""

    def __init__(self, *, include_finished_set: bool) -> None:
        """Args: include_finished_set: whether clients also get the ids of finished requests (several engines)."""
        self._finished: dict[int, set[str]] | None = defaultdict(set) if include_finished_set else None
        self._closing: list[tuple[int, EngineCoreOutput]] = []

    def __bool__(self) -> bool:
        """Whether a client waits for an end."""
        return bool(self._closing)

    def close(
        self, request: "Request", status: RequestStatus, error: str | None = None, code: str = INVALID_REQUEST
    ) -> None:
        """End a request that no step will end; its client hears of it with the next outputs.

        Args:
            request: not held by the core any more.
            status: how it ended.
            error: what its client should read.
            code: kind of the error.
        """
        request.status = status
        if error is not None:
            logger.error("Request %s: %s", request.request_id, error)
        self.note_finished(request)
        self._closing.append((request.client_index, closing_output(request, error, code)))

    def note_finished(self, request: "Request") -> None:
        """The request ended, whichever way."""
        if self._finished is not None:
            self._finished[request.client_index].add(request.request_id)

    def collect(self, outputs: dict[int, list[EngineCoreOutput]]) -> dict[int, EngineCoreOutputs]:
        """A step's outputs together with what has waited here, by client."""
        for client_index, output in self._closing:
            outputs.setdefault(client_index, []).append(output)
        self._closing.clear()
        by_client = {client: EngineCoreOutputs(outputs=rows) for client, rows in outputs.items()}
        if self._finished:
            for client, req_ids in self._finished.items():
                by_client.setdefault(client, EngineCoreOutputs()).finished_requests = req_ids
            self._finished = defaultdict(set)
        return by_client
