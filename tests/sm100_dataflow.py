# SPDX-License-Identifier: Apache-2.0
"""Blackwell's MLA decode in NumPy, tile by tile, out of the kernel's own index arithmetic and formulas.

What it cannot show: that the device's instructions do what their descriptors say. What it can: that the plan, the page
boxes, masks, rescaling, ring slots, parts and their merge add up to attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tokenspeed_plugin.kernels.mla.geometry import LATENT_DIMS, TILE_TOKENS, RowTiles, plan_words
from tokenspeed_plugin.kernels.mla.sm100 import arithmetic as at
from tokenspeed_plugin.kernels.mla.sm100 import formulas
from tokenspeed_plugin.kernels.mla.sm100.layout import ROW_COUNTS


class NumpyMath:
    """The mathematics of formulas.py in float64."""

    number = staticmethod(float)
    maximum = staticmethod(np.fmax)
    select = staticmethod(np.where)

    @staticmethod
    def exp2(x: np.ndarray) -> np.ndarray:
        return np.exp2(x)

    @staticmethod
    def log2(x: np.ndarray) -> np.ndarray:
        return np.log2(x)


@dataclass
class Batch:
    """One call: arrays as the kernel gets them, and how the grid is cut."""

    q: np.ndarray  # [tokens, heads, 576]
    cache: np.ndarray  # [pages, page_tokens, 576]; slots that no token owns hold NaN
    table: np.ndarray  # [requests, pages]; entries past the last page point past the cache
    seq_lens: list[int]
    query_starts: list[int]
    max_query_tokens: int
    groups: int
    scale: float
    element: str = "bfloat16"

    @property
    def tiles(self) -> RowTiles:
        return RowTiles.fold(self.q.shape[1], self.max_query_tokens, ROW_COUNTS)


def plan_of(batch: Batch) -> list[int]:
    """The plan as the plan kernel computes it, word by word."""
    groups, requests = batch.groups, len(batch.seq_lens)
    starts = [0]
    for length in batch.seq_lens:
        starts.append(starts[-1] + at.tiles_of(max(length, 0)))
    used, words = max(min(groups, starts[-1]), 1), [0] * plan_words(groups, requests)

    def put(word: str, index: int, value: int) -> None:
        words[at.plan_offset(word, groups, requests) + index] = value

    for group in range(groups):
        begin, end = (at.span_bound(min(group + more, used), used, starts[-1]) for more in (0, 1))
        request = max(sum(start <= begin for start in starts[:-1]) - 1, 0)
        put("group_request", group, request)
        put("group_tile", group, begin - starts[request])
        put("group_tiles", group, end - begin)
    for request in range(requests):
        begin, end = starts[request : request + 2]
        put("first_group", request, at.first_group(begin, used, starts[-1]) if end > begin else 0)
        put("last_group", request, at.last_group(end, used, starts[-1]) if end > begin else -1)
    return words


class Decode:
    """A run of the decode and merge kernels."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.tiles, self.plan = batch, batch.tiles, plan_of(batch)
        slots = 2 * batch.groups * self.tiles.row_tiles
        self.partial_out = np.full((slots * self.tiles.rows, LATENT_DIMS), np.nan)
        self.partial_lse = np.full(slots * self.tiles.rows, np.nan)
        self.out = np.full((*batch.q.shape[:2], LATENT_DIMS), np.nan)
        self.lse = np.full(batch.q.shape[:2], np.nan)

    def planned(self, word: str, index: int) -> int:
        return self.plan[at.plan_offset(word, self.batch.groups, len(self.batch.seq_lens)) + index]

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        with np.errstate(invalid="ignore", divide="ignore"):
            for token_tile in range(self.tiles.token_tiles):
                for head_tile in range(self.tiles.head_tiles):
                    for group in range(self.batch.groups):
                        self.walk(group, head_tile, token_tile)
            self.merge()
        return self.out, self.lse

    def walk(self, group: int, head_tile: int, token_tile: int) -> None:
        """A block: the items of its span."""
        request, tile = self.planned("group_request", group), self.planned("group_tile", group)
        left = self.planned("group_tiles", group)
        while left > 0:
            tiles = at.tiles_of(self.batch.seq_lens[request])
            count = min(tiles - tile, left)
            out, factor, lse = self.attend(request, tile, count, head_tile, token_tile)
            if count == tiles:
                self.write(request, head_tile, token_tile, out * factor[:, None], lse)
            else:
                row_tile = token_tile * self.tiles.head_tiles + head_tile
                slot = at.partial_slot(group, int(tile == 0), row_tile, self.tiles.row_tiles) * self.tiles.rows
                rows = slice(slot, slot + self.tiles.rows)
                assert np.isnan(self.partial_lse[rows]).all()  # nobody else's
                self.partial_out[rows], self.partial_lse[rows] = out * factor[:, None], lse
            left -= count
            tile = 0
            if left > 0:
                request += 1
                while self.batch.seq_lens[request] <= 0:
                    request += 1

    def rows_of(self, request: int, head_tile: int, token_tile: int) -> tuple[np.ndarray, np.ndarray]:
        """Token in the request and head of each row; rows past the tile repeat its last one."""
        used = np.minimum(np.arange(self.tiles.rows), self.tiles.heads * self.tiles.query_tokens - 1)
        first_token, first_head = token_tile * self.tiles.query_tokens, head_tile * self.tiles.heads
        return first_token + used // self.tiles.heads, first_head + used % self.tiles.heads

    def attend(self, request: int, tile: int, count: int, head_tile: int, token_tile: int) -> tuple[np.ndarray, ...]:
        """One item: output before it is divided, its factor, and lse in base 2."""
        batch, reach = self.batch, at.SOFTMAX_RANGES[self.batch.element]
        start, end = batch.query_starts[request], batch.query_starts[request + 1]
        tokens, heads = self.rows_of(request, head_tile, token_tile)
        last = min(start + max(end - start - 1, 0), len(batch.q) - 1)
        q = batch.q[np.minimum(start + tokens, last), np.minimum(heads, batch.q.shape[1] - 1)]
        visible = np.minimum(at.visible_tokens(batch.seq_lens[request], end - start, tokens), batch.seq_lens[request])
        scale = batch.scale * formulas.LOG2_E
        top, total = np.full(len(q), -math.inf), np.zeros(len(q))
        out = np.zeros((len(q), LATENT_DIMS))
        for number in range(tile, tile + count):
            kv = self.load(request, number)
            scores = kv @ q.T
            hidden = number * TILE_TOKENS + np.arange(TILE_TOKENS)[:, None] >= visible
            scores = np.where(hidden, -math.inf, scores)
            fresh = np.fmax.reduce(scores, axis=0) * scale
            if number == tile or (fresh > top + reach.lag_log2).any():
                top, factor = formulas.raised(NumpyMath, top, fresh)
                total, out = total * factor, out * factor[:, None]
            probs = formulas.probability(NumpyMath, scores, scale, top, reach.bias_log2)
            # Rounded, this is at most half of what the type holds.
            assert np.nanmax(probs) <= 2 ** (reach.lag_log2 + reach.bias_log2) * (1 + 1e-9)
            total = total + probs.sum(0)
            kv[max(batch.seq_lens[request] - number * TILE_TOKENS, 0) :] = 0.0  # clear_values
            out = out + probs.T @ kv[:, :LATENT_DIMS]
        factor, lse = formulas.row_end(NumpyMath, top, total, 1.0, reach.bias_log2)
        return out, factor, lse

    def load(self, request: int, tile: int) -> np.ndarray:
        """A tile as the bulk copies bring it; what no box covers holds NaN."""
        page_tokens = self.batch.cache.shape[1]
        box, shift = min(page_tokens, TILE_TOKENS), page_tokens.bit_length() - 1
        kv = np.full((TILE_TOKENS, 576), np.nan)
        valid = min(self.batch.seq_lens[request] - tile * TILE_TOKENS, TILE_TOKENS)
        for number in range(at.boxes_of(valid, box)):
            page = self.batch.table[request, at.box_page(tile, number, box, shift)]
            row = at.box_in_page(tile, number, box, shift) * box
            kv[number * box : (number + 1) * box] = self.batch.cache[page, row : row + box]
        return kv

    def write(self, request: int, head_tile: int, token_tile: int, out: np.ndarray, lse: np.ndarray) -> None:
        """The rows of an item that exist."""
        start, end = self.batch.query_starts[request], self.batch.query_starts[request + 1]
        for row in range(self.tiles.heads * self.tiles.query_tokens):
            token = token_tile * self.tiles.query_tokens + row // self.tiles.heads
            head = head_tile * self.tiles.heads + row % self.tiles.heads
            if token < end - start and head < self.batch.q.shape[1]:
                self.out[start + token, head], self.lse[start + token, head] = out[row], lse[row] * formulas.LN_2

    def merge(self) -> None:
        """The merge kernel: one (request, token, head) at a time."""
        starts = self.batch.query_starts
        for request in range(len(self.batch.seq_lens)):
            for token in range(starts[request + 1] - starts[request]):
                for head in range(self.batch.q.shape[1]):
                    self.merge_row(request, token, head)
        self.out[starts[-1] :], self.lse[starts[-1] :] = 0.0, -math.inf

    def merge_row(self, request: int, token: int, head: int) -> None:
        row, tiles = self.batch.query_starts[request] + token, self.tiles
        first, last = self.planned("first_group", request), self.planned("last_group", request)
        if last < 0:
            self.out[row, head], self.lse[row, head] = 0.0, -math.inf
        if last <= first:
            return
        row_tile = (token // tiles.query_tokens) * tiles.head_tiles + head // tiles.heads
        row_in_tile = (token % tiles.query_tokens) * tiles.heads + head % tiles.heads
        top, total, out = np.float64(-math.inf), np.float64(0.0), np.zeros(LATENT_DIMS)
        for group in range(first, last + 1):
            slot = at.partial_slot(group, int(group == first), row_tile, tiles.row_tiles)
            index = slot * tiles.rows + row_in_tile
            top, keep, weight = formulas.merge_step(NumpyMath, top, self.partial_lse[index])
            out, total = out * keep + self.partial_out[index] * weight, total * keep + weight
        factor, lse = formulas.row_end(NumpyMath, top, total, 1.0, 0.0)
        self.out[row, head], self.lse[row, head] = out * factor, lse * formulas.LN_2
