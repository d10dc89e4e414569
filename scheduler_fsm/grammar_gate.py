# SPDX-License-Identifier: Apache-2.0
"""Structured output: requests that wait for their grammar, and the masks of those that sample under one."""

from typing import TYPE_CHECKING, Any

from tokenspeed_plugin.host.names import GrammarOutput, strip_speculative_padding

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import Request, StructuredOutputManager


class GrammarGate:
    """Grammars compile in other threads; a request is not scheduled before its own is there."""

    def __init__(self, manager: "StructuredOutputManager") -> None:
        self._manager = manager
        self._waiting: dict[str, Request] = {}

    def hold(self, request: "Request") -> None:
        """Wait for the request's grammar."""
        self._waiting[request.request_id] = request

    def drop(self, req_id: str) -> None:
        """The request ended."""
        self._waiting.pop(req_id, None)

    def poll(self) -> tuple[list["Request"], list[tuple["Request", str]]]:
        """Requests whose grammar is there, and those whose grammar failed to compile, with the message."""
        if not self._waiting:
            return [], []
        ready: list[Request] = []
        failed: list[tuple[Request, str]] = []
        for request in list(self._waiting.values()):
            held = request.structured_output_request
            grammar = None if held is None else held.grammar
            if grammar is None:
                continue
            del self._waiting[request.request_id]
            if isinstance(grammar, Exception):
                failed.append((request, f"Invalid structured outputs: {grammar}"))
            else:
                ready.append(request)
        return ready, failed

    def accepts(self, request: "Request", token_ids: list[int]) -> bool:
        """Advance the request's grammar. The request must already list the tokens."""
        return bool(self._manager.accept_tokens(request, token_ids))

    def valid_drafts(self, request: "Request", drafts: list[int]) -> list[int]:
        """The longest prefix of the drafts that the request's grammar allows."""
        valid: list[int] = self._manager.validate_tokens(request, drafts)
        return valid

    def bitmask(self, requests: dict[str, "Request"], req_ids: list[str], spec_tokens: dict[str, list[int]]) -> Any:
        """vLLM's GrammarOutput for these rows, None when there are none left."""
        req_ids = [req_id for req_id in req_ids if req_id in requests]
        if not req_ids:
            return None
        mask = self._manager.grammar_bitmask(requests, req_ids, spec_tokens)
        acceptable = [len(strip_speculative_padding(spec_tokens.get(req_id, []))) for req_id in req_ids]
        return GrammarOutput(req_ids, mask, acceptable)
