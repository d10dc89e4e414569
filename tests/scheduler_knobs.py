# SPDX-License-Identifier: Apache-2.0
"""What the exact worker varies of vLLM's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Group:
    """One KV cache group.

    Args:
        block_tokens: tokens in a physical block.
        window_tokens: sliding window, including the token itself; None for full attention.
        window_is_chunk: the window starts at its last multiple (chunked local attention).
        keeps_state: one running state instead of KV (Mamba and its kin).
    """

    block_tokens: int = 4
    window_tokens: int | None = None
    window_is_chunk: bool = False
    keeps_state: bool = False

    def first_visible(self, position: int) -> int:
        """The first token that the one at `position` reads."""
        if self.window_tokens is None:
            return 0
        if self.window_is_chunk:
            return position // self.window_tokens * self.window_tokens
        return max(0, position - self.window_tokens + 1)


@dataclass(frozen=True)
class Knobs:
    """Everything of vLLM's configuration that the exact worker varies.

    `match_tokens` bounds the logical block of our scheduler. `num_blocks` counts usable blocks; vLLM's null block 0 is
    added on top. `pipeline_depth` is the number of batches that may be in flight: 1 is synchronous, 2 is async
    scheduling, more adds pipeline stages (V2 runner).
    """

    groups: tuple[Group, ...] = (Group(),)
    num_blocks: int = 64
    max_num_seqs: int = 8
    budget_tokens: int = 32
    max_model_len: int = 512
    runner: str = "v1"
    pipeline_depth: int = 1
    prefix_caching: bool = True
    match_tokens: int = 128
    policy: str = "fcfs"
    num_spec_tokens: int = 0
    draft_method: str = "ngram"
    num_context_ranks: int = 1
    num_lora_adapters: int = 0
    long_prefill_threshold_tokens: int = 0
    pooling: bool = False
    zero_blocks: bool = False
    connector: str | None = None
    connector_options: Mapping[str, Any] = field(default_factory=dict)
    load_failure_policy: str = "fail"
    encoder_step_embeds: int = 0
    encoder_cache_embeds: int = 0
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    observability: Mapping[str, Any] = field(default_factory=dict)
    additional_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_async(self) -> bool:
        return self.pipeline_depth > 1

    @property
    def pp_size(self) -> int:
        return max(1, self.pipeline_depth - 1)


# Physical block tokens, tokens that prompts share, and those of them that are reused.
REUSED_OF_COARSE_BLOCKS = [
    (528, 480, 440),
    (528, 1500, 1496),
    (528, 2000, 1936),
    (1536, 480, 384),
    (1536, 1500, 1408),
    (1536, 2000, 1920),
]
# Runner protocols and pipeline depths.
RUNNER_SHAPES = [("v1", 1), ("v1", 2), ("v2", 1), ("v2", 2)]
