# SPDX-License-Identifier: Apache-2.0
"""The softmax warpgroup: probabilities of each tile, rescaling of the output, and the finished rows.

Thread (warp w, lane 4g + c) holds tokens 16w + g and 16w + g + 8 of a score tile and rows 8j + 2c, 8j + 2c + 1 of each
j. Of the output it holds one dim of each latent slot, 32w + lane, and all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import tcgen05

from tokenspeed_plugin.kernels.mla.geometry import TILE_TOKENS
from tokenspeed_plugin.kernels.mla.sm100.arithmetic import (
    SOFTMAX_RANGES,
    SoftmaxRange,
    probability_offset,
    ring_slot,
    tiles_of,
    visible_tokens,
)
from tokenspeed_plugin.kernels.mla.sm100.block import (
    SOFTMAX_THREADS,
    Block,
)
from tokenspeed_plugin.kernels.mla.sm100.formulas import probability, raised, row_end
from tokenspeed_plugin.kernels.mla.sm100.layout import LATENT_SLOTS_OF_TILE, SOFTMAX_WARPS, SWIZZLE_ROW_BYTES
from tokenspeed_plugin.kernels.mla.sm100.loading import next_request
from tokenspeed_plugin.kernels.mla.sm100.memory import DeviceMath, fence_after_barrier, fence_before_barrier
from tokenspeed_plugin.kernels.mla.sm100.output import rescale_output, write_rows

TOKENS_OF_WARP, ROWS_OF_STEP = 16, 8
FULL_WARP_STEPS = (4, 8, 16)
"""Lane distances that join the eight lanes with the same rows."""
SOFTMAX_BARRIER = 1


@dataclass(frozen=True)
class Item:
    """The part of one request in the group's span, as the softmax warps see it."""

    request: Any
    first_tile: Any
    tiles: Any
    seq_len: Any
    query_tokens: Any
    index: Any


@dataclass(frozen=True)
class Rows:
    """Per-thread state of the rows: maxima in use and sums, base 2, and who this thread is."""

    block: Block
    thread: Any
    top: Any
    sum: Any

    @classmethod
    def of_thread(cls, block: Block) -> Rows:
        """The state of the running thread."""
        thread, _, _ = cute.arch.thread_idx()
        shape = (2, block.layout.rows // ROWS_OF_STEP)
        return cls(block, thread, cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor(shape, Float32))

    @property
    def rows(self) -> int:
        """Rows of the tile."""
        return self.block.layout.rows

    @property
    def warp(self) -> Any:
        """Warp of the warpgroup."""
        return self.thread // 32

    @property
    def lane(self) -> Any:
        """Lane of the warp."""
        return self.thread % 32

    @property
    def maxima(self) -> Any:
        """What the warps publish of each row, by turns in two buffers."""
        return self.block.floats("row maxima")

    @property
    def factors(self) -> Any:
        """What the output's rows are multiplied by next."""
        return self.block.floats("row factors")

    @property
    def range(self) -> SoftmaxRange:
        """How far probabilities may grow."""
        return SOFTMAX_RANGES[self.block.layout.element]

    def steps(self) -> list[tuple[int, int]]:
        """Static indices of this thread's rows."""
        return [(pair, step) for step in range(self.rows // ROWS_OF_STEP) for pair in range(2)]

    def row(self, pair: int, step: int) -> Any:
        """The row of such an index."""
        return ROWS_OF_STEP * step + 2 * (self.lane % 4) + pair

    def exchange(self, buffer: Any, row: Any) -> Any:
        """Where the warps publish a number of a row: one place per warp."""
        return (buffer * self.rows + row) * SOFTMAX_WARPS


def meet() -> None:
    """All softmax warps."""
    cute.arch.barrier(barrier_id=SOFTMAX_BARRIER, number_of_threads=SOFTMAX_THREADS)


@cute.jit
def load_scores(rows: Rows, first: cute.Pointer, buffer: Int32) -> cute.Tensor:
    """This thread's scores of a tile: (pair of rows, token half, step of rows)."""
    source = rows.block.scores(first, buffer)[((None, None), 0, 0)]
    load = tcgen05.Ld16x256bOp(tcgen05.Repetition(rows.rows // ROWS_OF_STEP))
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(load, Float32), source)
    mine = copy.get_slice(rows.thread)
    places = mine.partition_D(cute.make_identity_tensor((TILE_TOKENS, rows.rows)))
    scores = cute.make_rmem_tensor(places.shape, Float32)
    cute.copy(copy, mine.partition_S(source), scores)
    cute.arch.fence_view_async_tmem_load()
    return cute.make_tensor(scores.iterator, cute.make_layout((2, 2, rows.rows // ROWS_OF_STEP)))


@cute.jit
def mask(rows: Rows, scores: cute.Tensor, item: Item, tile: Int32) -> None:
    """Hides what lies past the request's end, whatever it holds, and what comes after a row's own token."""
    block = rows.block
    token = tile * TILE_TOKENS + rows.warp * TOKENS_OF_WARP + rows.lane // 4
    for pair, step in rows.steps():
        query = block.first_token + rows.row(pair, step) // block.tiles.heads
        visible = cutlass.min(visible_tokens(item.seq_len, item.query_tokens, query), item.seq_len)
        for half in cutlass.range_constexpr(2):
            hidden = token + 8 * half >= visible
            scores[pair, half, step] = cutlass.select_(hidden, -Float32.inf, scores[pair, half, step])


@cute.jit
def publish_maxima(rows: Rows, scores: cute.Tensor, buffer: Int32) -> None:
    """The largest score of each row among this warp's tokens, into shared memory."""
    maxima = rows.maxima
    for pair, step in rows.steps():
        value = cute.arch.fmax(scores[pair, 0, step], scores[pair, 1, step])
        for distance in FULL_WARP_STEPS:
            value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=distance))
        if rows.lane < 4:
            maxima[rows.exchange(buffer, rows.row(pair, step)) + rows.warp] = value


@cute.jit
def raise_maxima(rows: Rows, first: cute.Pointer, buffer: Int32, fresh_item: Boolean, scale: Float32) -> None:
    """Adopts the tile's maxima where those in use lag too far, and rescales sums and output; the same in all threads."""
    fresh = cute.make_rmem_tensor_like(rows.top)
    lags = fresh_item
    for pair, step in rows.steps():
        at = rows.exchange(buffer, rows.row(pair, step))
        value = cute.arch.fmax(rows.maxima[at], rows.maxima[at + 1])
        value = cute.arch.fmax(value, cute.arch.fmax(rows.maxima[at + 2], rows.maxima[at + 3])) * scale
        fresh[pair, step] = value
        lags = lags | (value > rows.top[pair, step] + rows.range.lag_log2)
    top, sums, factors = rows.top, rows.sum, rows.factors
    if cute.arch.vote_any_sync(lags):
        for pair, step in rows.steps():
            following, factor = raised(DeviceMath, top[pair, step], fresh[pair, step])
            top[pair, step] = following
            sums[pair, step] = sums[pair, step] * factor
            if rows.thread < 4:
                factors[rows.row(pair, step)] = factor
        if not fresh_item:
            meet()
            rescale_output(rows.block, first, rows.thread, factors)


@cute.jit
def store_probabilities(rows: Rows, scores: cute.Tensor, scale: Float32) -> None:
    """Probabilities into shared memory as the products read them, and into the sums."""
    layout, sums = rows.block.layout, rows.sum
    for pair, step in rows.steps():
        for half in cutlass.range_constexpr(2):
            scores[pair, half, step] = probability(
                DeviceMath, scores[pair, half, step], scale, rows.top[pair, step], rows.range.bias_log2
            )
        sums[pair, step] = sums[pair, step] + (scores[pair, 0, step] + scores[pair, 1, step])
    rounded = cute.make_rmem_tensor(scores.shape, rows.block.variant.element)
    rounded.store(scores.load().to(rows.block.variant.element))
    word = cutlass.Int32 if layout.element_bytes == 2 else cutlass.Int16
    words = cute.recast_tensor(rounded, word)
    start = layout.offset("probabilities")
    for step in cutlass.range_constexpr(rows.rows // ROWS_OF_STEP):
        for half in cutlass.range_constexpr(2):
            token = rows.warp * TOKENS_OF_WARP + rows.lane // 4 + 8 * half
            at = probability_offset(token, rows.row(0, step), rows.rows, layout.element_bytes)
            target = cute.make_tensor(rows.block.pointer(word, start + at, word.width // 8), cute.make_layout(1))
            target[0] = words[0, half, step]


@cute.jit
def clear_values(rows: Rows, index: Int32, valid: Int32) -> None:
    """Zeroes the tile's tokens past the request's end: they may hold NaN, and 0 x NaN would reach the output."""
    layout = rows.block.layout
    row_bytes = SWIZZLE_ROW_BYTES
    block_bytes = TILE_TOKENS * row_bytes
    zeros = cute.make_rmem_tensor((4,), Int32)
    zeros.fill(0)
    for part in cutlass.range(LATENT_SLOTS_OF_TILE):
        slot = ring_slot(index * LATENT_SLOTS_OF_TILE + part, layout.latent_slots)
        for number in cutlass.range_constexpr(layout.latent_slot_bytes // block_bytes):
            start = layout.offset("latent ring") + slot * layout.latent_slot_bytes + number * block_bytes
            for at in cutlass.range(valid * row_bytes + rows.thread * 16, block_bytes, SOFTMAX_THREADS * 16):
                target = cute.make_tensor(rows.block.pointer(Int32, start + at, 16), cute.make_layout(4))
                cute.autovec_copy(zeros, target)


@cute.jit
def soften_tile(rows: Rows, first: cute.Pointer, item: Item, number: Int32, scale: Float32) -> None:
    """One tile: scores in, probabilities out, output rescaled where a maximum has grown."""
    block, layout = rows.block, rows.block.layout
    index, tile = item.index + number, item.first_tile + number
    buffer = index % layout.score_buffers
    cute.arch.mbarrier_wait(block.barrier("scores full", buffer), (index // layout.score_buffers) & 1)
    fence_after_barrier()
    scores = load_scores(rows, first, buffer)
    if (tile + 1) * TILE_TOKENS > visible_tokens(item.seq_len, item.query_tokens, 0):
        mask(rows, scores, item, tile)
    publish_maxima(rows, scores, buffer)
    # The product before this one: behind it the probabilities' memory is free and the output may be rescaled.
    cute.arch.mbarrier_wait(block.barrier("values done"), (index & 1) ^ 1)
    fence_after_barrier()
    meet()
    raise_maxima(rows, first, buffer, number == 0, scale)
    store_probabilities(rows, scores, scale)
    if (tile + 1) * TILE_TOKENS > item.seq_len:
        clear_values(rows, index, item.seq_len - tile * TILE_TOKENS)
    cute.arch.fence_view_async_shared()
    fence_before_barrier()
    cute.arch.mbarrier_arrive(block.barrier("probabilities full"))


@cute.jit
def join_sums(rows: Rows, buffer: Int32, scale: Float32) -> None:
    """Row sums over all threads; leaves the output's factors in shared memory and lse, base 2, in `rows.top`."""
    top, sums, shared, factors = rows.top, rows.sum, rows.maxima, rows.factors
    for pair, step in rows.steps():
        value = sums[pair, step]
        for distance in FULL_WARP_STEPS:
            value = value + cute.arch.shuffle_sync_bfly(value, offset=distance)
        if rows.lane < 4:
            shared[rows.exchange(buffer, rows.row(pair, step)) + rows.warp] = value
    meet()
    for pair, step in rows.steps():
        at = rows.exchange(buffer, rows.row(pair, step))
        total = (shared[at] + shared[at + 1]) + (shared[at + 2] + shared[at + 3])
        factor, lse = row_end(DeviceMath, top[pair, step], total, scale, rows.range.bias_log2)
        if rows.thread < 4:
            factors[rows.row(pair, step)] = factor
        top[pair, step] = lse
    meet()


@cute.jit
def soften_item(rows: Rows, first: cute.Pointer, item: Item) -> None:
    """All tiles of one request in the span, and its rows."""
    block, a = rows.block, rows.block.arguments
    rows.top.fill(-Float32.inf)
    rows.sum.fill(0.0)
    for number in cutlass.range(item.tiles):
        soften_tile(rows, first, item, number, a.scale_log2)
    last = item.index + item.tiles - 1
    cute.arch.mbarrier_wait(block.barrier("values done"), last & 1)
    fence_after_barrier()
    whole = item.tiles == tiles_of(item.seq_len)
    join_sums(rows, (last + 1) % block.layout.score_buffers, cutlass.select_(whole, a.output_scale, Float32(1.0)))
    write_rows(rows, first, item, whole)


@cute.jit
def soften(block: Block, first: cute.Pointer) -> None:
    """All requests of the group's span."""
    a, rows = block.arguments, Rows.of_thread(block)
    request, tile = a.planned("group_request", block.group), a.planned("group_tile", block.group)
    left, index = a.planned("group_tiles", block.group), Int32(0)
    while left > 0:
        seq_len = a.seq_lens[request]
        count = cutlass.min(tiles_of(seq_len) - tile, left)
        query_tokens = a.query_starts[request + 1] - a.query_starts[request]
        soften_item(rows, first, Item(request, tile, count, seq_len, query_tokens, index))
        left -= count
        index += count
        tile = Int32(0)
        if left > 0:
            request = next_request(a.seq_lens, request)
