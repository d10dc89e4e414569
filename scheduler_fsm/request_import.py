# SPDX-License-Identifier: Apache-2.0
"""vLLM's requests, in the core's terms."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tokenspeed_plugin.host.names import get_request_block_hasher
from tokenspeed_plugin.scheduler_fsm import _core
from tokenspeed_plugin.scheduler_fsm.embedding_spans import embedding_spans
from tokenspeed_plugin.scheduler_fsm.encoder_inputs import encoder_inputs_of

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import Request, SamplingParams

# Where the prepared prompt rides on vLLM's request, from EngineCore's input thread to the scheduler.
_PROMPT = "_tokenspeed_prompt"
_MOST = 2**32 - 1


class PromptImporter:
    """Turns prompts into token arrays with their prefix keys.

    Stands in for vLLM's block hasher: EngineCore calls it once for each new request, in its input thread, so that hashing neither
    holds up a step nor the GIL.
    """

    def __init__(self, key_tokens: int, lookahead_tokens: int = 0) -> None:
        """Set what keys name.

        Args:
            key_tokens: tokens per prefix key; 0 when prefix caching is off.
            lookahead_tokens: tokens behind a block that its key names as well.
        """
        self._key_tokens = key_tokens
        self._lookahead_tokens = lookahead_tokens
        self._vllm_keys: Callable[[Request], list[bytes]] | None = None
        # From the first request with a salt or an adapter on, what isolation costs is counted.
        self._counts_isolation = False

    def hasher(self, *_: Any) -> "PromptImporter":
        """The factory of vLLM's block hasher; makes this importer stand in for it."""
        return self

    def hasher_beside_vllm(self, hash_block_tokens: int, hash_function: Any, lookahead_tokens: int) -> "PromptImporter":
        """The same, with vLLM's own block hashes beside ours: a connector's store is shared with engines that know only those."""
        # vLLM 0.32 knows no lookahead.
        lookahead = (lookahead_tokens,) if lookahead_tokens else ()
        self._vllm_keys = get_request_block_hasher(hash_block_tokens, hash_function, *lookahead)
        return self

    def __call__(self, request: "Request") -> list[bytes]:
        """vLLM's hasher interface. The keys stay with the prepared prompt; vLLM's own list is left empty without a connector."""
        if not hasattr(request, _PROMPT):
            setattr(request, _PROMPT, self._prepare(request))
        return [] if self._vllm_keys is None else self._vllm_keys(request)

    def take(self, request: "Request") -> _core.PreparedPrompt:
        """The request's prepared prompt; made now when no hasher ran, or when a connector has cut the prompt since."""
        prompt = request.__dict__.pop(_PROMPT, None)
        if prompt is not None and prompt.num_tokens != request.num_tokens:
            prompt = None
        # Keep the mark: output tokens that are mirrored later must not be taken for a new prompt.
        setattr(request, _PROMPT, None)
        return prompt if prompt is not None else self._prepare(request)

    def _prepare(self, request: "Request") -> _core.PreparedPrompt:
        lora = request.lora_request
        self._counts_isolation = self._counts_isolation or bool(request.cache_salt) or lora is not None
        spans = embedding_spans(request, self._key_tokens)
        return _core.prepare_prompt(
            tokens=request._all_token_ids,
            key_tokens=self._key_tokens,
            salt=request.cache_salt or "",
            adapter=lora.lora_name if lora is not None else "",
            content_spans=spans,
            encoder_inputs=encoder_inputs_of(request) if request.mm_features else (),
            lookahead_tokens=self._lookahead_tokens,
            # Tokens alone do not say what an image or an embedding is.
            marks_content=self._counts_isolation and not spans and not request.mm_features,
        )


def stop_rules(request: "Request") -> _core.StopRules:
    """When the request's generation ends."""
    params = request.sampling_params
    if params is None:
        return _core.StopRules(eos_token=None, stop_tokens=[], min_tokens=0, max_tokens=1)
    repetition = params.repetition_detection
    return _core.StopRules(
        eos_token=params.eos_token_id,
        stop_tokens=params.stop_token_ids or [],
        min_tokens=_clamped(params.min_tokens),
        max_tokens=_clamped(request.max_tokens),
        repetition=(0, 0, 0)
        if repetition is None
        else (
            _clamped(repetition.min_pattern_size),
            _clamped(repetition.max_pattern_size),
            _clamped(repetition.min_count),
        ),
    )


def _clamped(count: int) -> int:
    """A count as the core holds it; nothing reaches its largest, so cutting there changes nothing."""
    return min(max(count, 0), _MOST)


def is_plain(request: "Request") -> bool:
    """Whether its output rows, between the first and the last, carry nothing but tokens."""
    params: SamplingParams | None = request.sampling_params
    return (
        params is not None
        and params.num_logprobs is None
        and params.prompt_logprobs is None
        and request.structured_output_request is None
        and not request.trace_headers
        and request.spec_decode_metrics is None
    )


def adapter_number(request: "Request") -> int:
    """The number of its LoRA adapter, 0 for none."""
    lora: Any = request.lora_request
    return 0 if lora is None else int(lora.lora_int_id)
