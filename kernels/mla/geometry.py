# SPDX-License-Identifier: Apache-2.0
"""Sizes of multi-head latent attention and how query rows fold into the tiles of a decode kernel."""

from __future__ import annotations

from dataclasses import dataclass

LATENT_DIMS = 512
ROPE_DIMS = 64
HEAD_DIMS = LATENT_DIMS + ROPE_DIMS
TILE_TOKENS = 64
"""KV tokens per tile: the granularity of the split plan."""
NARROW_ROWS, WIDE_ROWS = 16, 64
"""Row tiles for which the Hopper kernel is compiled: rows on the N and on the M side of the products."""
FP8_ROWS = (16, 32, 64)
"""Row tiles of its FP8 version: 16 on the N side, the others on the N side of the output alone."""


@dataclass(frozen=True)
class RowTiles:
    """How the q x H query rows of one request fold into row tiles of a kernel.

    A row tile holds `query_tokens` tokens of `heads` heads each, at most `rows` rows. All row tiles of a request read the
    same KV tokens.
    """

    rows: int
    heads: int
    query_tokens: int
    head_tiles: int
    token_tiles: int

    @property
    def row_tiles(self) -> int:
        """Row tiles of a request."""
        return self.head_tiles * self.token_tiles

    @classmethod
    def fold(
        cls, num_heads: int, max_query_tokens: int, compiled: tuple[int, ...] = (NARROW_ROWS, WIDE_ROWS)
    ) -> RowTiles:
        """The smallest fold for `num_heads` heads and up to `max_query_tokens` tokens of a request.

        `compiled` lists the row counts to choose from, ascending; a fold of more than one row tile uses the last.

        Raises:
            ValueError: a count is not positive.
        """
        if num_heads < 1 or max_query_tokens < 1:
            raise ValueError(f"num_heads={num_heads}, max_query_tokens={max_query_tokens}: both must be at least 1")
        limit = compiled[-1]
        head_tiles = -(-num_heads // limit)
        heads = -(-num_heads // head_tiles)
        token_tiles = -(-max_query_tokens // max(1, limit // heads))
        query_tokens = -(-max_query_tokens // token_tiles)
        rows = next(rows for rows in compiled if rows >= heads * query_tokens)
        return cls(rows, heads, query_tokens, head_tiles, token_tiles)

    def groups(self, num_multiprocessors: int) -> int:
        """Blocks that share the KV of a batch, per row tile."""
        return max(1, num_multiprocessors // self.row_tiles)


def plan_words(groups: int, num_requests: int) -> int:
    """32-bit words of a split plan; `PlanView` and `plan_kernel` in csrc lay it out."""
    return 5 * groups + 3 * num_requests + 1
