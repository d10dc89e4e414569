# SPDX-License-Identifier: Apache-2.0
"""How the KV tokens of a batch are cut into the tiles of the kernel, on the CPU and once per step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

TILE_TOKENS, CLUSTER_BLOCKS = 128, 2
"""Tokens of a tile, which are of one request, and tiles of a cluster, as in `csrc/params.cuh`."""
TILE_FIELDS = ("row", "request", "position", "tokens")


def plan_tiles(kv_starts: Sequence[int]) -> torch.Tensor:
    """Tiles in the order of the batch; one without tokens fills up the last cluster.

    Args:
        kv_starts: rows at which the requests' KV tokens begin among those of the batch, and the number of rows.

    Returns:
        [tiles, 4] int32 on the CPU, an even number of tiles; the fields are `TILE_FIELDS`: row of the first token, request,
        position of the first token in it, tokens.
    """
    parts = []
    for request, (start, end) in enumerate(itertools.pairwise(kv_starts)):
        positions = torch.arange(0, end - start, TILE_TOKENS, dtype=torch.int32)
        tokens = (end - start - positions).clamp(max=TILE_TOKENS)
        parts.append(torch.stack((start + positions, torch.full_like(positions, request), positions, tokens), dim=1))
    tiles = torch.cat(parts)
    return torch.cat((tiles, tiles.new_zeros(-len(tiles) % CLUSTER_BLOCKS, len(TILE_FIELDS))))
