# SPDX-License-Identifier: Apache-2.0
"""How requests end, and the outputs that say so."""

from typing import TYPE_CHECKING, Any

from tokenspeed_plugin.host.differences import known_fields
from tokenspeed_plugin.host.names import EngineCoreOutput, RequestError, RequestStatus
from tokenspeed_plugin.scheduler_fsm._core import FinishReason

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import Request

STATUS = {
    FinishReason.STOP: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH_CAPPED,
    FinishReason.ABORT: RequestStatus.FINISHED_ABORTED,
    FinishReason.TIMEOUT: RequestStatus.FINISHED_ABORTED,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
    FinishReason.REPETITION: RequestStatus.FINISHED_REPETITION,
}
REASON = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_IGNORED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}
# The core numbers its reasons in this order when it hands them over as integers.
BY_NUMBER = (
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.ABORT,
    FinishReason.TIMEOUT,
    FinishReason.ERROR,
    FinishReason.REPETITION,
)

# Kinds of errors: one that comes back however often the request is sent, and one that another try may spare.
INVALID_REQUEST = "validation_error"
OVER_CAPACITY = "over_capacity"


def closing_output(request: "Request", error: str | None = None, code: str = INVALID_REQUEST) -> Any:
    """The last output of a request that ended outside a model step (refused, failed, or cut short by the pool).

    Args:
        request: with its final status set.
        error: what its client should read. vLLM 0.32 has no field for it, there the log is the only place.
        code: kind of the error. With vLLM 0.33 a client sees 400 for the first kind, 503 for the second.
    """
    details: dict[str, Any] = {}
    if error is not None:
        details = known_fields(EngineCoreOutput, error=_request_error(error, code))
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        stop_reason=request.stop_reason,
        events=request.take_events(),
        trace_headers=request.trace_headers,
        **details,
    )


def _request_error(message: str, code: str) -> Any:
    return RequestError(code=code, message=message, **known_fields(RequestError, retryable=code == OVER_CAPACITY))
