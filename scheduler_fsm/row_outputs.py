# SPDX-License-Identifier: Apache-2.0
"""Outputs of rows that carry more than tokens: first and last ones, log probabilities, grammars, traces."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tokenspeed_plugin.host.log import logger as named_logger
from tokenspeed_plugin.host.names import EngineCoreOutput, RequestStatus
from tokenspeed_plugin.scheduler_fsm import outcomes
from tokenspeed_plugin.scheduler_fsm._core import Core, FinishReason

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import ModelRunnerOutput, Request
    from tokenspeed_plugin.scheduler_fsm._core import SpecialRow
    from tokenspeed_plugin.scheduler_fsm.draft_metrics import DraftMetrics
    from tokenspeed_plugin.scheduler_fsm.grammar_gate import GrammarGate

logger = named_logger(__name__)


class RowOutputs:
    """Builds EngineCoreOutputs one by one, for the rows that the core does not build itself."""

    def __init__(
        self,
        core: Core,
        grammars: "GrammarGate",
        drafts: "DraftMetrics",
        cached_block_tokens: int,
        *,
        returns_masks: bool = False,
        mirrors_tokens: bool = False,
    ) -> None:
        """Set what rows carry.

        Args:
            core: builds the other rows.
            grammars: of structured outputs.
            drafts: counts what became of each request's drafts.
            cached_block_tokens: prompts enter the prefix cache in multiples of this; 0 when there is none.
            returns_masks: whether outputs carry the sampler's masks (`--return-sampling-mask`).
            mirrors_tokens: whether a connector reads the requests' own lists of tokens.
        """
        self._core = core
        self._grammars = grammars
        self._drafts = drafts
        self._cached_block_tokens = cached_block_tokens
        self._returns_masks = returns_masks
        self._mirrors_tokens = mirrors_tokens

    def build(
        self,
        rows: "list[SpecialRow]",
        model_output: "ModelRunnerOutput",
        num_invalid_drafts: dict[str, int] | None,
    ) -> Iterator[tuple["Request", EngineCoreOutput]]:
        """Each row's request and output; a request that ended has its final status.

        Args:
            rows: from the core.
            model_output: of the step.
            num_invalid_drafts: by request, drafts that a grammar ruled out before they were verified.
        """
        nans = model_output.num_nans_in_logits or {}
        for request, handle, position, token_ids, reason, stop_token, num_drafts, num_accepted in rows:
            pooled = model_output.pooler_output[position] if model_output.pooler_output else None
            if pooled is not None:
                self._core.finish(handle, FinishReason.STOP)
                request.status = RequestStatus.FINISHED_STOPPED
            if reason >= 0:
                self._end(request, outcomes.BY_NUMBER[reason], stop_token)
            if num_drafts and token_ids:
                num_invalid = (num_invalid_drafts or {}).get(request.request_id, 0)
                self._drafts.observe(request, num_drafts - num_invalid, num_accepted)
            if token_ids and request.structured_output_request is not None:
                self._advance_grammar(request, handle, token_ids)
            elif token_ids and self._mirrors_tokens:
                request.append_output_token_ids(token_ids)
            if not token_ids and not request.is_finished():
                continue
            request.num_nans_in_logits = nans.get(request.request_id, request.num_nans_in_logits)
            yield request, self._output(request, token_ids, position, model_output, pooled)

    def _end(self, request: "Request", reason: FinishReason, stop_token: int | None) -> None:
        request.status = outcomes.STATUS[reason]
        if reason == FinishReason.REPETITION:
            request.stop_reason = "repetition_detected"
        elif stop_token is not None:
            request.stop_reason = stop_token

    def _advance_grammar(self, request: "Request", handle: int, token_ids: list[int]) -> None:
        # The grammar (and a reasoning parser) reads the request's own lists.
        request.append_output_token_ids(token_ids)
        if self._grammars.accepts(request, token_ids):
            return
        logger.error("Request %s ends: its grammar rejects the tokens %s.", request.request_id, token_ids)
        self._core.finish(handle, FinishReason.ERROR)
        request.status = RequestStatus.FINISHED_ERROR

    def _output(
        self, request: "Request", token_ids: list[int], position: int, model_output: "ModelRunnerOutput", pooled: Any
    ) -> EngineCoreOutput:
        req_id = request.request_id
        params = request.sampling_params
        logprobs = None
        if params is not None and params.num_logprobs is not None and model_output.logprobs:
            logprobs = model_output.logprobs.slice_request(position, len(token_ids))
        mask = None
        if self._returns_masks and token_ids and model_output.sampling_masks is not None:
            mask = model_output.sampling_masks.slice_request(position, len(token_ids))
        prefill_stats: Any = request.take_prefill_stats()
        if prefill_stats is not None:
            prefill_stats.finalize(self._num_cached_tokens(request))
        return EngineCoreOutput(
            request_id=req_id,
            new_token_ids=token_ids,
            new_logprobs=logprobs,
            new_sampling_mask=mask,
            new_prompt_logprobs_tensors=model_output.prompt_logprobs_dict.get(req_id),
            prompt_token_id_logprobs=model_output.prompt_token_id_logprobs_dict.get(req_id),
            pooling_output=pooled,
            finish_reason=request.get_finished_reason(),
            stop_reason=request.stop_reason,
            events=request.take_events(),
            prefill_stats=prefill_stats,
            spec_decode_metrics=request.spec_decode_metrics if request.is_finished() else None,
            trace_headers=request.trace_headers,
            num_nans_in_logits=request.num_nans_in_logits,
        )

    def _num_cached_tokens(self, request: "Request") -> int:
        unit = self._cached_block_tokens
        return 0 if unit == 0 else request.num_prompt_tokens // unit * unit
