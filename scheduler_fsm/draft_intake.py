# SPDX-License-Identifier: Apache-2.0
"""Draft tokens on their way from the workers into the next step, or into one that is already planned."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenspeed_plugin.host.names import DraftTokenIds, Request, SchedulerOutput
    from tokenspeed_plugin.scheduler_fsm._core import Core
    from tokenspeed_plugin.scheduler_fsm.grammar_gate import GrammarGate


class DraftIntake:
    """Hands drafts on, cut to what each request's grammar allows."""

    def __init__(
        self, core: "Core", requests: "dict[str, Request]", handles: dict[str, int], grammars: "GrammarGate"
    ) -> None:
        self._core = core
        self._requests = requests
        self._handles = handles
        self._grammars = grammars

    def set(self, drafts: "DraftTokenIds") -> None:
        """Set what the next step verifies."""
        for request, token_ids in self._live(drafts):
            self._core.set_drafts(self._handles[request.request_id], self._grammars.valid_drafts(request, token_ids))

    def fill(self, drafts: "DraftTokenIds", output: "SchedulerOutput") -> None:
        """Put drafts in place of a planned step's placeholders; what a grammar rules out stays -1."""
        num_invalid: dict[str, int] = {}
        planned = output.scheduled_spec_decode_tokens
        for request, token_ids in self._live(drafts):
            req_id = request.request_id
            num_planned = len(planned.get(req_id, ()))
            if num_planned == 0:
                continue
            valid = self._grammars.valid_drafts(request, token_ids[:num_planned])
            if len(valid) < num_planned:
                num_invalid[req_id] = num_planned - len(valid)
            planned[req_id] = valid + [-1] * (num_planned - len(valid))
        output.num_invalid_spec_tokens = num_invalid

    def _live(self, drafts: "DraftTokenIds") -> "Iterator[tuple[Request, list[int]]]":
        for req_id, token_ids in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            request = self._requests.get(req_id)
            if request is not None:
                yield request, token_ids
