# SPDX-License-Identifier: Apache-2.0
"""What a real-model test asks of an engine, and what it gets back: plain data that travels between processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class InputChunk:
    """More input for a session with streaming input.

    Attributes:
        step: engine step before which it is sent.
        prompt_token_ids: the new input.
        max_tokens: how many tokens to generate for it at most.
    """

    step: int
    prompt_token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class PromptRequest:
    """One greedy request.

    Attributes:
        prompt_token_ids: the prompt.
        max_tokens: how many tokens to generate at most.
        arrival_step: engine step before which the request is added.
        abort_after_tokens: abort once this many tokens have come out; 0 aborts one step after arrival.
        chunks: makes it a session; the end of its input is sent with the last one.
        sampling: further arguments of vLLM's `SamplingParams`; `structured_outputs` as a mapping.
        priority: smaller goes first, under the priority policy.
        adapter: folder of a LoRA adapter.
        embedding_seed: when set, the prompt is sent as embeddings drawn from this seed, one for each token id.
        images: seeds of its images, in the order of their placeholders.
    """

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    arrival_step: int = 0
    abort_after_tokens: int | None = None
    chunks: tuple[InputChunk, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    priority: int = 0
    adapter: Path | None = None
    embedding_seed: int | None = None
    images: tuple[int, ...] = ()


@dataclass(frozen=True)
class Intervention:
    """A call of a method of vLLM's `EngineCore` while requests run.

    Attributes:
        step: engine step before which it is called.
        method: its name.
        arguments: its keyword arguments.
    """

    step: int
    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenario:
    """Requests for one engine in one process of its own.

    Attributes:
        model: folder of the model.
        scheduler_cls: dotted path of the scheduler class, or None for vLLM's own choice.
        engine_arguments: further keyword arguments of ``vllm.LLM``.
        requests: what to send, in order of arrival.
        host_patches: names of functions of `cpu_host`, called before the engine is built.
        interventions: calls while requests run.
    """

    model: Path
    requests: tuple[PromptRequest, ...]
    scheduler_cls: str | None = None
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    host_patches: tuple[str, ...] = ()
    interventions: tuple[Intervention, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a scenario gave.

    Attributes:
        token_ids: generated tokens by request, in the order of the scenario.
        finish_reasons: ``length``, ``stop`` or ``abort`` by request.
        num_steps: engine steps taken.
        num_preemptions: how often a running request lost its blocks, as vLLM counts it.
        num_cached_tokens: prompt tokens found in the prefix cache.
        num_query_tokens: prompt tokens looked up in the prefix cache.
        scheduler_name: qualified name of the scheduler class that ran; empty when it ran in another process.
        finish_order: request numbers as they ended.
        counters: vLLM's metrics that count, by name, at the end.
        prompt_logprobs: by request, the log probability of each prompt token, where it was asked for.
        embeddings: by request, of a pooling model.
        answers: by intervention, what the call returned.
        num_batches_in_flight: most steps that the engine queued.
        num_external_tokens: prompt tokens that a KV connector found.
        encoder_limits: embeddings that a step may compute and that the encoder cache holds; (0, 0) for a text model.
    """

    token_ids: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[str, ...]
    num_steps: int
    num_preemptions: int
    num_cached_tokens: int
    num_query_tokens: int
    encoder_limits: tuple[int, int]
    scheduler_name: str
    finish_order: tuple[int, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    prompt_logprobs: tuple[tuple[float, ...] | None, ...] = ()
    embeddings: tuple[tuple[float, ...], ...] = ()
    answers: tuple[Any, ...] = ()
    num_batches_in_flight: int = 1
    num_external_tokens: int = 0
