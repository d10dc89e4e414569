# SPDX-License-Identifier: Apache-2.0
"""What a trace says once it is loaded: sessions of turns, each a prompt that shares content with others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.control.tokens import FIRST_TOKEN, VOCABULARY_TOKENS, mixed_hash, splitmix64

_STREAM_MASK = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, eq=False)
class Prompt:
    """Content of a prompt: numbered blocks, the same number in the same space being the same tokens.

    Args:
        space: name of the space that block ids live in, as a number; one per session, or one per file.
        block_ids: uint32, one per full block.
        block_tokens: tokens in a block.
        num_tokens: length of the prompt; what the blocks do not cover is content that nobody else has.
        tail: number of that content.
    """

    space: int
    block_ids: NDArray[np.uint32]
    block_tokens: int
    num_tokens: int
    tail: int

    def token_ids(self, first_token: int = FIRST_TOKEN, num_kinds: int = VOCABULARY_TOKENS) -> list[int]:
        """Return the prompt as token ids from `first_token` to `first_token + num_kinds - 1`."""
        covered = min(len(self.block_ids) * self.block_tokens, self.num_tokens)
        blocks = self.block_ids[: -(-covered // self.block_tokens)].astype(np.uint64)
        streams = splitmix64((blocks << np.uint64(20)) ^ np.uint64(mixed_hash(1, self.space) >> 1)) & _STREAM_MASK
        positions = np.arange(self.block_tokens, dtype=np.uint64)
        body = splitmix64((streams[:, None] << np.uint64(32)) + positions[None, :]).reshape(-1)[:covered]
        tail_stream = np.uint64(mixed_hash(2, self.space, self.tail) & 0xFFFFFFFF)
        tail = splitmix64((tail_stream << np.uint64(32)) + np.arange(self.num_tokens - covered, dtype=np.uint64))
        values = np.concatenate([body, tail]) % np.uint64(num_kinds)
        tokens: list[int] = (values.astype(np.int64) + first_token).tolist()
        return tokens


@dataclass(frozen=True)
class Turn:
    """One request.

    Args:
        gap_s: wait between the end of the session's previous answer and this request; 0 for a first turn.
        prompt: its content.
        output_tokens: tokens that the answer has.
    """

    gap_s: float
    prompt: Prompt
    output_tokens: int


@dataclass(frozen=True)
class Session:
    """Turns that follow each other: the next one begins after the previous answer plus its gap."""

    name: str
    start_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Trace:
    """Sessions in the order of their starts."""

    name: str
    sessions: tuple[Session, ...]

    @property
    def num_turns(self) -> int:
        """Requests in all sessions."""
        return sum(len(session.turns) for session in self.sessions)

    def describe(self) -> str:
        """Return one line about size and lengths."""
        turns = [turn for session in self.sessions for turn in session.turns]
        prompts = [turn.prompt.num_tokens for turn in turns]
        outputs = [turn.output_tokens for turn in turns]
        return (
            f"{self.name}: {len(self.sessions)} sessions, {len(turns)} turns, prompt median {np.median(prompts):,.0f} "
            f"(longest {max(prompts):,}), output median {np.median(outputs):,.0f} (longest {max(outputs):,}) tokens"
        )


def shared_tokens(first: Prompt, second: Prompt) -> int:
    """Return the length of the prefix that two prompts have in common, in whole blocks."""
    if first.space != second.space or first.block_tokens != second.block_tokens:
        return 0
    most = min(len(first.block_ids), len(second.block_ids))
    differs = np.flatnonzero(first.block_ids[:most] != second.block_ids[:most])
    num_blocks = int(differs[0]) if len(differs) else most
    return min(num_blocks * first.block_tokens, first.num_tokens, second.num_tokens)
