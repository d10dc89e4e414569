# SPDX-License-Identifier: Apache-2.0
"""The cells of MLA decode and of prefill on a cached prefix, and what physics allows on them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tokenspeed_plugin.kernels.mla.cached_prefill.groups import KEY_DIMS, NOPE_DIMS, VALUE_DIMS
from tokenspeed_plugin.kernels.mla.geometry import HEAD_DIMS, LATENT_DIMS

TOKEN_BYTES = HEAD_DIMS * 2
BF16_FLOPS_PER_S = 790e12
"""bf16 products on an H200 with random data, measured with an 8192 x 8192 x 8192 product."""


@dataclass(frozen=True)
class Cell:
    """Decode of `requests` requests of `context_tokens` cached tokens each."""

    heads: int
    query_tokens: int
    requests: int
    context_tokens: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV that one call must read."""
        return self.requests * self.context_tokens * TOKEN_BYTES

    def floor_us(self, bytes_per_s: float) -> float:
        """The larger of KV bytes over bandwidth and operations over the matrix rate."""
        rows = self.requests * self.query_tokens * self.heads
        flops = 2 * rows * self.context_tokens * (HEAD_DIMS + LATENT_DIMS)
        return 1e6 * max(self.kv_bytes / bytes_per_s, flops / BF16_FLOPS_PER_S)

    @staticmethod
    def parse(text: str) -> Cell:
        """Heads, query tokens, requests and context: 128x1x16x64K, say.

        Raises:
            ValueError: it is nothing of the kind.
        """
        heads, query_tokens, requests, context = text.split("x")
        tokens = int(context[:-1]) * 1024 if context.endswith("K") else int(context)
        return Cell(int(heads), int(query_tokens), int(requests), tokens)

    def __str__(self) -> str:
        return f"H{self.heads} q{self.query_tokens} B{self.requests} L{self.context_tokens // 1024}K"


SMALL = ((1, 8192), (1, 65536), (4, 32768), (16, 8192))
LARGE = ((16, 65536), (64, 8192), (128, 8192))
LONG = (131072, 262144, 524288, 1048576)


def cells(heads: tuple[int, ...], query_tokens: tuple[int, ...], shapes: tuple[tuple[int, int], ...]) -> list[Cell]:
    """Every combination, shapes innermost."""
    return [Cell(h, q, b, length) for h in heads for q in query_tokens for b, length in shapes]


@dataclass(frozen=True)
class PrefillCell:
    """`query_tokens` new tokens of one request on `context_tokens` cached ones."""

    heads: int
    query_tokens: int
    context_tokens: int

    @property
    def floor_us(self) -> float:
        """Operations of the cheaper way over the matrix rate: keys and values unfolded, or queries absorbed."""
        pairs = self.query_tokens * (self.context_tokens + self.query_tokens / 2)
        unfold = LATENT_DIMS * (NOPE_DIMS + VALUE_DIMS)
        unfolded = (self.context_tokens + self.query_tokens) * unfold + pairs * (KEY_DIMS + VALUE_DIMS)
        absorbed = self.query_tokens * unfold + pairs * (HEAD_DIMS + LATENT_DIMS)
        return 2e6 * self.heads * min(unfolded, absorbed) / BF16_FLOPS_PER_S

    def __str__(self) -> str:
        return f"H{self.heads} {self.query_tokens} on {self.context_tokens // 1024}K"


PREFILL_HEADS, PREFILL_QUERIES, PREFILL_CONTEXTS = (16, 128), (256, 512, 2048), (32768, 65536, 131072)
"""What the project's issue asks for."""
OTHER_PREFILLS = tuple(
    PrefillCell(16, *shape)
    for shape in ((64, 65536), (128, 65536), (256, 8192), (512, 8192), (2048, 8192), (8192, 65536))
)
"""Cells that only tell an engine where our kernel is the better one."""


def prefill_cells(heads: tuple[int, ...] = PREFILL_HEADS) -> list[PrefillCell]:
    """The cells of the bar, for some of its head counts."""
    return [PrefillCell(h, q, c) for h in heads for q in PREFILL_QUERIES for c in PREFILL_CONTEXTS]


def geometric_mean(values: list[float]) -> float:
    """Of positive values; NaN for none."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan
