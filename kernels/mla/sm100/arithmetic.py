# SPDX-License-Identifier: Apache-2.0
"""The kernel's index arithmetic and constants, written once for the compiler's integers and for Python's.

The kernels call these functions while they are traced; the tests call them with plain integers and rebuild the whole
attention from them. Only +, -, *, //, %, shifts and bit operations occur, on numbers that are not negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenspeed_plugin.kernels.mla.geometry import TILE_TOKENS

SPLIT_WORDS = ("group_request", "group_tile", "group_tiles", "group_seq_len", "group_page")
REQUEST_WORDS = ("first_group", "last_group")
"""Arrays of a split plan, in its order; the tile starts of the requests, one more than requests, come last."""


@dataclass(frozen=True)
class SoftmaxRange:
    """How far probabilities may grow before they are rounded.

    Attributes:
        lag_log2: the maximum in use may be this much too low before the output is rescaled.
        bias_log2: probabilities are stored times two to this power; it cancels when the output is divided by their sum.
    """

    lag_log2: float
    bias_log2: float


SOFTMAX_RANGES = {
    "bfloat16": SoftmaxRange(8.0, 0.0),
    # At most 2^8 of e4m3's 448; a probability keeps its three bits of mantissa down to 2^-10 of the largest.
    "float8_e4m3fn": SoftmaxRange(4.0, 4.0),
}


def plan_offset(word: str, groups: Any, num_requests: Any) -> Any:
    """Index at which one of a split plan's arrays begins; `plan_words` of geometry.py is their end."""
    if word in SPLIT_WORDS:
        return SPLIT_WORDS.index(word) * groups
    if word in REQUEST_WORDS:
        return len(SPLIT_WORDS) * groups + REQUEST_WORDS.index(word) * num_requests
    return len(SPLIT_WORDS) * groups + len(REQUEST_WORDS) * num_requests  # tile_start


def span_bound(group: Any, used: Any, tiles: Any) -> Any:
    """First tile of a group when `used` groups share `tiles` tiles; that of group `used` is their end."""
    return group * tiles // used


def first_group(first_tile: Any, used: Any, tiles: Any) -> Any:
    """The group that has a request's first tile."""
    return ((first_tile + 1) * used - 1) // tiles


def last_group(end_tile: Any, used: Any, tiles: Any) -> Any:
    """The group that has a request's last tile, the one before `end_tile`."""
    return (end_tile * used - 1) // tiles


def tiles_of(seq_len: Any) -> Any:
    """KV tiles of a request; its length is at least 0."""
    return (seq_len + TILE_TOKENS - 1) // TILE_TOKENS


def box_page(tile: Any, box: Any, box_tokens: int, page_shift: Any) -> Any:
    """Column of the page table that holds a box of a tile; a tile is TILE_TOKENS / box_tokens boxes."""
    return (tile * TILE_TOKENS + box * box_tokens) >> page_shift


def box_in_page(tile: Any, box: Any, box_tokens: int, page_shift: Any) -> Any:
    """Which box of its page that is: the bulk tensor copy counts token coordinates in boxes."""
    return ((tile * TILE_TOKENS + box * box_tokens) & ((1 << page_shift) - 1)) // box_tokens


def boxes_of(valid_tokens: Any, box_tokens: int) -> Any:
    """Boxes of a tile that hold at least one of its `valid_tokens` tokens."""
    return (valid_tokens + box_tokens - 1) // box_tokens


def visible_tokens(seq_len: Any, query_tokens: Any, token: Any) -> Any:
    """Tokens of its request that query token `token` sees: all up to its own."""
    return seq_len - query_tokens + 1 + token


def partial_slot(group: Any, starts_request: Any, row_tile: Any, row_tiles: Any) -> Any:
    """Slot of a group's partial output: one for a request that begins with it (1), one for a request that it ends (0)."""
    return (2 * group + starts_request) * row_tiles + row_tile


def ring_slot(index: Any, slots: int) -> Any:
    """Slot of the `index`-th filling of a ring."""
    return index % slots


def ring_phase(index: Any, slots: int) -> Any:
    """Parity on which the consumer of the `index`-th filling waits; the producer waits on the other one."""
    return (index // slots) & 1


def swizzled(offset: Any, row_bytes: int) -> Any:
    """Byte offset after the swizzle of rows of 16 (none), 32, 64 or 128 bytes: 16-byte units move within 8 rows of 128."""
    units = row_bytes // 16 - 1
    return offset ^ ((offset >> 3) & (units << 4))


def query_offset(row: Any, unit: Any, rows: int, row_bytes: int) -> Any:
    """Byte of a 16-byte unit of a query row: blocks of [rows][row_bytes], the K-major operand of the scores."""
    per_row = row_bytes // 16
    return (unit // per_row) * (rows * row_bytes) + swizzled(row * row_bytes + (unit % per_row) * 16, row_bytes)


def probability_offset(token: Any, row: Any, rows: int, element_bytes: int) -> Any:
    """Byte of a probability: [tokens][rows], the MN-major operand of the values."""
    row_bytes = rows * element_bytes
    return swizzled(token * row_bytes + row * element_bytes, row_bytes)
