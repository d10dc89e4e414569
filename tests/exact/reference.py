# SPDX-License-Identifier: Apache-2.0
"""Ground truth: tokens as a pure function of the prompt, with no KV memory.

A *context value* stands for everything a model knows at one position: it is chained over all tokens up to and including
that position. It is what the exact worker keeps in a KV slot, because the KV of a real transformer at a position also
depends on every token before it. Layout of a value: `mix (61 bits) | position (20 bits) | token (20 bits)`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

TOKEN_BITS = 20
POSITION_BITS = 20
MIX_SHIFT = TOKEN_BITS + POSITION_BITS
TOKEN_MASK = (1 << TOKEN_BITS) - 1
POSITION_MASK = (1 << POSITION_BITS) - 1
PRIME = (1 << 61) - 1
MULTIPLIER = 0x1B873593CC9E2D51 % PRIME
TOKEN_MULTIPLIER = 0x0E6546B64F3A9C2D % PRIME

EMPTY = 0
FIRST_TOKEN = 3
DEFAULT_VOCAB = 512


def chain(value: int, position: int, token: int) -> int:
    """The context value at `position`, from the value at the position before it and the token."""
    mix = ((value >> MIX_SHIFT) * MULTIPLIER + (token + 1) * TOKEN_MULTIPLIER + position) % PRIME
    return mix << MIX_SHIFT | position << TOKEN_BITS | token


def seed_value(seed: int) -> int:
    """The value before the first token; requests of different adapter or salt start from different seeds."""
    return ((seed * TOKEN_MULTIPLIER + 0x5851F42D) % PRIME) << MIX_SHIFT


def extend(values: list[int], tokens: Sequence[int], seed: int) -> None:
    """Appends the values of `tokens`, which follow the positions already in `values`."""
    value = values[-1] if values else seed_value(seed)
    position = len(values)
    for token in tokens:
        value = chain(value, position, token)
        values.append(value)
        position += 1


def describe(value: int) -> str:
    """What a slot holds, for an error message."""
    if value == EMPTY:
        return "nothing (never written or zeroed)"
    return f"token {value & TOKEN_MASK} of position {value >> TOKEN_BITS & POSITION_MASK}"


def next_token(value: int, forbidden: Collection[int] = (), vocab: int = DEFAULT_VOCAB) -> int:
    """The greedy token after a context; `forbidden` stands for the min_tokens logits mask."""
    mix = value >> MIX_SHIFT
    while True:
        mix = (mix * TOKEN_MULTIPLIER + 0x9E3779B9) % PRIME
        token = FIRST_TOKEN + (mix >> 20) % (vocab - FIRST_TOKEN)
        if token not in forbidden:
            return token


@dataclass(frozen=True)
class Stops:
    """When a request ends, in vLLM's order of checks."""

    max_tokens: int
    max_model_len: int
    eos_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0

    @property
    def all_stop_ids(self) -> frozenset[int]:
        eos = () if self.eos_token_id is None else (self.eos_token_id,)
        return frozenset((*self.stop_token_ids, *eos))


@dataclass(frozen=True)
class Answer:
    """The whole output of one request and why it ended (`stop` or `length`)."""

    tokens: tuple[int, ...]
    finish_reason: str
    stop_reason: int | None


def generate(prompt: Sequence[int], stops: Stops, seed: int = 0, vocab: int = DEFAULT_VOCAB) -> Answer:
    """The right answer to a prompt."""
    value = seed_value(seed)
    for position, token in enumerate(prompt):
        value = chain(value, position, token)
    tokens: list[int] = []
    while True:
        forbidden = stops.all_stop_ids if len(tokens) < stops.min_tokens else ()
        token = next_token(value, forbidden, vocab)
        tokens.append(token)
        if token == stops.eos_token_id:
            return Answer(tuple(tokens), "stop", None)
        if token in stops.stop_token_ids:
            return Answer(tuple(tokens), "stop", token)
        if len(tokens) >= stops.max_tokens or len(prompt) + len(tokens) >= stops.max_model_len:
            return Answer(tuple(tokens), "length", None)
        value = chain(value, len(prompt) + len(tokens) - 1, token)
