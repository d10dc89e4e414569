# SPDX-License-Identifier: Apache-2.0
"""What the exact worker knows of one request: its tokens, its block tables and the context values it computed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from exact.images import Image, spliced
from exact.reference import extend


@dataclass(slots=True)
class Flight:
    """Rejected drafts of steps in flight; a resumed request starts a new one."""

    num_rejected: int = 0


@dataclass(eq=False)
class Row:
    """State of one request in the worker.

    Attributes:
        tokens: ids known to the runner's host memory; -1 where a sampled token never left the device.
        values: context values of computed positions; its length is the true number of computed tokens.
        tables: block ids per group.
        device_tokens: tokens sampled in the last step that ran this request, newest last.
        drafts: tokens proposed after the last step, on the device.
        flight: what the scheduler has not yet been told of this request.
        last_step: number of the step that last ran this request.
        sampled_step: number of the step that last sampled for this request.
        kept_blocks: of a session that was sent again as new: what it held before, with valid content.
        images: its multimodal inputs.
        in_batch: whether it kept its place in the persistent batch since the step before (V1 runner).
    """

    request_id: str
    seed: int
    prompt_tokens: int
    tokens: list[int]
    tables: list[list[int]]
    sampling_params: Any
    pooling: bool = False
    lora_id: int = 0
    values: list[int] = field(default_factory=list)
    device_tokens: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    flight: Flight = field(default_factory=Flight)
    num_draft_scheduled: int = 0
    last_step: int = -1
    sampled_step: int = -1_000
    kept_blocks: Collection[int] = ()
    images: list[Image] = field(default_factory=list)
    in_batch: bool = False
    min_tokens: int = 0
    stop_ids: Collection[int] = ()

    def __post_init__(self) -> None:
        if self.sampling_params is not None:
            self.min_tokens = self.sampling_params.min_tokens
            self.stop_ids = frozenset(self.sampling_params.all_stop_token_ids)

    def forbidden(self, position: int) -> Collection[int]:
        """Tokens that min_tokens masks for the token that follows `position`."""
        if self.min_tokens and position + 1 - self.prompt_tokens < self.min_tokens:
            return self.stop_ids
        return ()

    def rebuild(self, tokens: Sequence[int]) -> None:
        """Takes the values of a prefix that the scheduler says is already in KV."""
        self.values = []
        extend(self.values, spliced(tokens, self.images) if self.images else tokens, self.seed)


@dataclass(slots=True)
class Input:
    """One request's share of a step: tokens for positions [start, start + len(tokens)), the last ones drafts."""

    row: Row
    start: int
    tokens: list[int]
    num_drafts: int
    samples: bool
