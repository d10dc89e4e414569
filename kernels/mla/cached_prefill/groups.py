# SPDX-License-Identifier: Apache-2.0
"""How a batch of prefills is cut so that its keys and values fit a workspace.

It is cut by heads first and by requests where that is not enough, never along a request's tokens: every query row then sees
all its keys in one call, and there are no partial results to merge.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed_plugin.kernels.mla.geometry import HEAD_DIMS

KEY_DIMS, NOPE_DIMS, VALUE_DIMS = 192, 128, 128
"""Of a head: key dims (no rope, then rope), those without rope, and value dims."""
HEADS_WANTED = 8
"""Heads at once below which a batch is rather cut by requests: fewer would leave multiprocessors idle."""
TOKEN_BYTES = 2 * HEAD_DIMS
"""Of the gathered latents."""
TOKEN_HEAD_BYTES = 2 * 2 * KEY_DIMS
"""Of keys and values; values lie in the pitch of keys."""


class WorkspaceTooSmallError(ValueError):
    """A request whose keys and values do not fit, not even those of a single head."""


@dataclass(frozen=True)
class Group:
    """Requests that are unfolded together, `heads` at a time: all of them, or a power of two.

    Attributes:
        requests: which ones.
        query_starts: their first query rows within the group, and the number of rows.
        kv_starts: the same of KV tokens, prefix and new ones.
        heads: heads at once; the last pass may have fewer.
    """

    requests: slice
    query_starts: tuple[int, ...]
    kv_starts: tuple[int, ...]
    heads: int

    @property
    def num_kv_tokens(self) -> int:
        """KV tokens of all requests."""
        return self.kv_starts[-1]

    @property
    def longest_query(self) -> int:
        """Query tokens of the request that has most."""
        return max(end - start for start, end in itertools.pairwise(self.query_starts))

    @property
    def longest_kv(self) -> int:
        """KV tokens of the request that has most."""
        return max(end - start for start, end in itertools.pairwise(self.kv_starts))

    def bytes(self) -> int:
        """What the group takes of the workspace."""
        return self.num_kv_tokens * (TOKEN_BYTES + self.heads * TOKEN_HEAD_BYTES)


def workspace_bytes(num_kv_tokens: int, heads: int) -> int:
    """Bytes for so many KV tokens with `heads` at once."""
    return num_kv_tokens * (TOKEN_BYTES + heads * TOKEN_HEAD_BYTES)


def group_requests(query_lens: Sequence[int], kv_lens: Sequence[int], num_heads: int, limit_bytes: int) -> list[Group]:
    """Cut a batch.

    Args:
        query_lens: new tokens of each request; one without any is passed over, its KV too.
        kv_lens: KV tokens of each request, the new ones included.
        num_heads: query heads on this GPU.
        limit_bytes: of the workspace.

    Raises:
        WorkspaceTooSmallError: one request alone does not fit.
        ValueError: a request has fewer KV tokens than new ones.
    """
    wanted = limit_bytes // workspace_bytes(1, min(HEADS_WANTED, num_heads))
    groups: list[Group] = []
    first = total = 0
    for request, (queries, kv) in enumerate(zip(query_lens, kv_lens, strict=True)):
        if kv < queries:
            raise ValueError(f"request {request}: {kv} KV tokens, allowed: at least its {queries} new ones")
        tokens = kv if queries else 0
        if total and total + tokens > wanted:
            groups.append(_group(first, request, query_lens, kv_lens, num_heads, limit_bytes))
            first, total = request, 0
        total += tokens
    if total:
        groups.append(_group(first, len(query_lens), query_lens, kv_lens, num_heads, limit_bytes))
    return groups


def _group(
    first: int, end: int, query_lens: Sequence[int], kv_lens: Sequence[int], num_heads: int, limit_bytes: int
) -> Group:
    queries = list(query_lens[first:end])
    kv_starts = (0, *itertools.accumulate(kv if q else 0 for q, kv in zip(queries, kv_lens[first:end], strict=True)))
    fitting = (limit_bytes // kv_starts[-1] - TOKEN_BYTES) // TOKEN_HEAD_BYTES
    if fitting < 1:
        raise WorkspaceTooSmallError(
            f"{kv_starts[-1]} KV tokens of one head take {workspace_bytes(kv_starts[-1], 1)} bytes, "
            f"the workspace has {limit_bytes}"
        )
    # A power of two: 128 tiles of rows, heads and splits fill 132 multiprocessors, 152 would take them twice.
    heads = num_heads if fitting >= num_heads else 1 << (fitting.bit_length() - 1)
    return Group(slice(first, end), (0, *itertools.accumulate(queries)), kv_starts, heads)
