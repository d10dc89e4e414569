# SPDX-License-Identifier: Apache-2.0
"""How the drafts of each request fared (vLLM's `per_request_spec_decode_metrics`)."""

from typing import TYPE_CHECKING

from tokenspeed_plugin.host.names import RequestSpecDecodeMetrics

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import Request, VllmConfig


class DraftMetrics:
    """Keeps vLLM's tally on each request; its client gets it with the last output. Off, no request has one."""

    def __init__(self, vllm_config: "VllmConfig") -> None:
        level = vllm_config.observability_config.per_request_spec_decode_metrics
        self._enabled = level not in (None, "none")
        self._detailed = level == "detailed"
        self._num_draft_tokens: int = vllm_config.num_speculative_tokens

    def open(self, request: "Request") -> None:
        """A request arrives."""
        if self._enabled:
            request.spec_decode_metrics = RequestSpecDecodeMetrics.new(self._num_draft_tokens)

    def observe(self, request: "Request", num_proposed: int, num_accepted: int) -> None:
        """A step verified drafts of a request.

        Args:
            request: any.
            num_proposed: drafts that no grammar had ruled out.
            num_accepted: of these.
        """
        if request.spec_decode_metrics is not None:
            request.spec_decode_metrics.observe(num_proposed, num_accepted, self._detailed)
