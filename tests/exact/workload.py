# SPDX-License-Identifier: Apache-2.0
"""What clients do to a scheduler: arrivals, aborts and cache resets at given ticks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from exact.images import Image, spliced
from exact.reference import DEFAULT_VOCAB, Answer, Stops, generate, next_token, seed_value

BEFORE_SCHEDULE = 0
BEFORE_UPDATE = 1


@dataclass(frozen=True)
class Chunk:
    """More input for a session.

    Args:
        tick: when it is sent, counted from the arrival of the session.
        prompt: its tokens; empty for the end of the input.
        max_tokens: of the answer to it.
    """

    tick: int
    prompt: tuple[int, ...] = ()
    max_tokens: int = 0


@dataclass
class Arrival:
    """One request of a workload.

    Args:
        tick: when it is added; with `after`, how many ticks after that request has ended.
        abort_tick: when its client disconnects, counted from its arrival; None for never.
        abort_phase: before `schedule` or between `schedule` and `update_from_output` of that tick.
        images: its multimodal inputs.
        refused: the scheduler must refuse it, with no token.
        chunks: of a resumable session, in the order of their ticks; the last one ends it.
    """

    tick: int
    request_id: str
    prompt: list[int]
    max_tokens: int
    eos_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    priority: int = 0
    cache_salt: str | None = None
    lora_id: int = 0
    after: str | None = None
    abort_tick: int | None = None
    abort_phase: int = BEFORE_SCHEDULE
    pooling: bool = False
    images: tuple[Image, ...] = ()
    refused: bool = False
    chunks: tuple[Chunk, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def most_tokens(self) -> int:
        """Tokens that it holds at its end, at most."""
        return len(self.prompt) + self.max_tokens + sum(len(c.prompt) + c.max_tokens for c in self.chunks)

    @property
    def seed(self) -> int:
        """Seed of its context: requests of another adapter or salt must not share KV."""
        salt = sum(ord(letter) * 131**index for index, letter in enumerate(self.cache_salt or ""))
        return self.lora_id * 7919 + salt

    def stops(self, max_model_len: int) -> Stops:
        """Its stop conditions under a model length."""
        return Stops(self.max_tokens, max_model_len, self.eos_token_id, self.stop_token_ids, self.min_tokens)

    def answer(self, max_model_len: int, vocab: int = DEFAULT_VOCAB) -> Answer:
        """The right output."""
        return generate(spliced(self.prompt, self.images), self.stops(max_model_len), self.seed, vocab)


@dataclass(frozen=True)
class Reset:
    """A `reset_prefix_cache` call at a tick, or a `reset_encoder_cache` call."""

    tick: int
    reset_running: bool = False
    encoder: bool = False


@dataclass
class Workload:
    """All that happens in one scenario; `seed` is only for messages."""

    arrivals: list[Arrival]
    resets: list[Reset] = field(default_factory=list)
    seed: int | None = None

    def __repr__(self) -> str:
        return f"Workload(seed={self.seed}, {len(self.arrivals)} requests, {len(self.resets)} resets)"


def words(stream: int, count: int, vocab: int = DEFAULT_VOCAB) -> list[int]:
    """`count` prompt tokens that depend on the stream only, so that prompts of one stream share prefixes."""
    value = seed_value(stream + 1)
    tokens = []
    for position in range(count):
        value = (value * 6364136223846793005 + 1442695040888963407 + position) % (1 << 101)
        tokens.append(next_token(value, (), vocab))
    return tokens
