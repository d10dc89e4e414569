# SPDX-License-Identifier: Apache-2.0
"""The softmax warpgroup of the prefill kernel: thread r has row r of scores and output, so that rows need no exchange."""

from __future__ import annotations

import math
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import tcgen05

from tokenspeed_plugin.kernels.mla.sm100.arithmetic import SOFTMAX_RANGES, ring_slot
from tokenspeed_plugin.kernels.mla.sm100.formulas import LN_2, probability, raised, row_end
from tokenspeed_plugin.kernels.mla.sm100.layout import SWIZZLE_ROW_BYTES
from tokenspeed_plugin.kernels.mla.sm100.memory import DeviceMath, fence_after_barrier, fence_before_barrier
from tokenspeed_plugin.kernels.mla.sm100.prefill.arithmetic import UNIT_BYTES, probability_offset, visible_tokens
from tokenspeed_plugin.kernels.mla.sm100.prefill.block import PrefillBlock
from tokenspeed_plugin.kernels.mla.sm100.prefill.layout import (
    BLOCK_DIMS,
    ELEMENT_BYTES,
    KV_TILE,
    QUERY_TILE,
    VALUE_DIMS,
)

CHUNK = 32
"""Columns of tensor memory that a thread loads at a time."""
UNIT_ELEMENTS = UNIT_BYTES // ELEMENT_BYTES
RANGE = SOFTMAX_RANGES["bfloat16"]


def row_copies(source: Any, thread: Any) -> tuple[Any, Any, Any, Any]:
    """Load and store of 32 columns of this thread's row, its chunks, and registers for one."""
    load = tcgen05.make_tmem_copy(cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(CHUNK)), Float32), source)
    store = tcgen05.make_tmem_copy(cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(CHUNK)), Float32), source)
    mine = load.get_slice(thread)
    places = mine.partition_D(cute.make_identity_tensor((QUERY_TILE, cute.size(source, mode=[1]))))
    return load, store, mine.partition_S(source), cute.make_rmem_tensor(places[(None, None, 0)].shape, Float32)


@cute.jit
def load_scores(block: PrefillBlock, first: cute.Pointer, buffer: Int32, thread: Int32) -> cute.Tensor:
    """This thread's row of a score tile."""
    load, _, chunks, values = row_copies(block.scores(first, buffer)[((None, None), 0, 0)], thread)
    scores = cute.make_rmem_tensor((KV_TILE,), Float32)
    for chunk in cutlass.range_constexpr(KV_TILE // CHUNK):
        cute.copy(load, chunks[(None, None, chunk)], values)
        cute.arch.fence_view_async_tmem_load()
        for number in cutlass.range_constexpr(CHUNK):
            scores[chunk * CHUNK + number] = values[number]
    return scores


@cute.jit
def rescale_output(block: PrefillBlock, first: cute.Pointer, thread: Int32, factor: Float32) -> None:
    """Multiplies this thread's row of the output."""
    load, store, chunks, values = row_copies(block.output(first)[((None, None), 0, 0)], thread)
    for chunk in cutlass.range(VALUE_DIMS // CHUNK):
        cute.copy(load, chunks[(None, None, chunk)], values)
        cute.arch.fence_view_async_tmem_load()
        for number in cutlass.range_constexpr(CHUNK):
            values[number] = values[number] * factor
        cute.copy(store, values, chunks[(None, None, chunk)])
    cute.arch.fence_view_async_tmem_store()


@cute.jit
def hide(scores: cute.Tensor, seen: Int32) -> None:
    """Drops a row's scores from token `seen` of the tile on, whatever they are."""
    for chunk in cutlass.range_constexpr(KV_TILE // CHUNK):
        for number in cutlass.range_constexpr(CHUNK):
            token = chunk * CHUNK + number
            scores[token] = cutlass.select_(seen <= token, Float32(-math.inf), scores[token])


@cute.jit
def row_maximum(scores: cute.Tensor) -> Float32:
    """The largest of a row's scores."""
    fresh = Float32(-math.inf)
    for chunk in cutlass.range_constexpr(KV_TILE // CHUNK):
        for number in cutlass.range_constexpr(CHUNK):
            fresh = cute.arch.fmax(fresh, scores[chunk * CHUNK + number])
    return fresh


@cute.jit
def store_probabilities(block: PrefillBlock, scores: cute.Tensor, thread: Int32, top: Float32) -> Float32:
    """A row of probabilities into shared memory as the products read it; returns its sum."""
    start, total = block.layout.offset("probabilities"), Float32(0.0)
    for unit in cutlass.range_constexpr(KV_TILE // UNIT_ELEMENTS):
        values = cute.make_rmem_tensor((UNIT_ELEMENTS,), Float32)
        for number in cutlass.range_constexpr(UNIT_ELEMENTS):
            score = scores[unit * UNIT_ELEMENTS + number]
            value = probability(DeviceMath, score, block.arguments.scale_log2, top, RANGE.bias_log2)
            values[number] = value
            total += value
        rounded = cute.make_rmem_tensor((UNIT_ELEMENTS,), BFloat16)
        rounded.store(values.load().to(BFloat16))
        pointer = block.pointer(BFloat16, start + probability_offset(thread, unit), UNIT_BYTES)
        cute.autovec_copy(rounded, cute.make_tensor(pointer, cute.make_layout(UNIT_ELEMENTS)))
    return total


@cute.jit
def clear_values(block: PrefillBlock, tile: Int32, valid: Int32, thread: Int32) -> None:
    """Zeroes the tile's tokens past the request's end: another request may hold NaN, and 0 x NaN would reach this one."""
    slot_bytes, block_bytes = KV_TILE * VALUE_DIMS * ELEMENT_BYTES, KV_TILE * SWIZZLE_ROW_BYTES
    zeros = cute.make_rmem_tensor((4,), Int32)
    zeros.fill(0)
    for part in cutlass.range_constexpr(VALUE_DIMS // BLOCK_DIMS):
        start = block.layout.offset("value ring") + ring_slot(tile, block.layout.value_slots) * slot_bytes
        for at in cutlass.range(valid * SWIZZLE_ROW_BYTES + thread * 16, block_bytes, QUERY_TILE * 16):
            pointer = block.pointer(Int32, start + part * block_bytes + at, 16)
            cute.autovec_copy(zeros, cute.make_tensor(pointer, cute.make_layout(4)))


@cute.jit
def soften_tile(
    block: PrefillBlock, first: cute.Pointer, tile: Int32, thread: Int32, top: Float32, total: Float32
) -> tuple[Float32, Float32]:
    """One tile: scores in, probabilities out; returns the row's maximum in use and sum."""
    layout, a = block.layout, block.arguments
    buffer = tile % layout.score_buffers
    cute.arch.mbarrier_wait(block.barrier("scores full", buffer), (tile // layout.score_buffers) & 1)
    fence_after_barrier()
    scores = load_scores(block, first, buffer, thread)
    seen = visible_tokens(block.first_row + thread, block.query_tokens, block.kv_tokens, block.variant.causal)
    seen = cutlass.min(seen, block.kv_tokens) - tile * KV_TILE
    if seen < KV_TILE:
        hide(scores, seen)
    fresh = row_maximum(scores) * a.scale_log2
    # The product before this one: behind it the probabilities' memory is free and the output may be rescaled.
    cute.arch.mbarrier_wait(block.barrier("values done"), (tile & 1) ^ 1)
    fence_after_barrier()
    lags = (tile == 0) | (fresh > top + RANGE.lag_log2)
    if cute.arch.vote_any_sync(lags):  # the copies of a warp go together
        following, factor = raised(DeviceMath, top, fresh)
        top = following
        total = total * factor
        if tile > 0:
            rescale_output(block, first, thread, factor)
    total += store_probabilities(block, scores, thread, top)
    valid = block.kv_tokens - tile * KV_TILE
    if valid < KV_TILE:
        cute.arch.mbarrier_wait(
            block.barrier("value full", ring_slot(tile, layout.value_slots)), (tile // layout.value_slots) & 1
        )
        clear_values(block, tile, valid, thread)
    cute.arch.fence_view_async_shared()
    fence_before_barrier()
    cute.arch.mbarrier_arrive(block.barrier("probabilities full"))
    return top, total


@cute.jit
def soften(block: PrefillBlock, first: cute.Pointer) -> None:
    """All tiles of the block, then its rows."""
    thread, _, _ = cute.arch.thread_idx()
    top, total = Float32(-math.inf), Float32(0.0)
    for tile in cutlass.range(block.tiles):
        top, total = soften_tile(block, first, tile, thread, top, total)
    if block.tiles > 0:
        cute.arch.mbarrier_wait(block.barrier("values done"), (block.tiles - 1) & 1)
        fence_after_barrier()
    factor, lse = row_end(DeviceMath, top, total, Float32(1.0), RANGE.bias_log2)
    write_row(block, first, thread, factor)
    row, lses = block.first_row + thread, block.arguments.lse
    if row < block.query_tokens:
        lses[block.query_start + row, block.head] = lse * LN_2


@cute.jit
def write_row(block: PrefillBlock, first: cute.Pointer, thread: Int32, factor: Float32) -> None:
    """This thread's row, 16 bytes at a time; zeros where the request has no KV."""
    load, _, chunks, values = row_copies(block.output(first)[((None, None), 0, 0)], thread)
    row, some = block.first_row + thread, Boolean(block.tiles > 0)
    for chunk in cutlass.range_constexpr(VALUE_DIMS // CHUNK):
        values.fill(0.0)
        if some:
            cute.copy(load, chunks[(None, None, chunk)], values)
            cute.arch.fence_view_async_tmem_load()
            for number in cutlass.range_constexpr(CHUNK):
                values[number] = cutlass.select_(factor > 0.0, values[number] * factor, Float32(0.0))
        if row < block.query_tokens:
            rounded = cute.make_rmem_tensor((CHUNK,), BFloat16)
            flat = cute.make_tensor(values.iterator, cute.make_layout(CHUNK))
            rounded.store(flat.load().to(BFloat16))
            target = block.arguments.out[block.query_start + row, block.head, None]
            parts = cute.logical_divide(target, cute.make_layout(CHUNK))
            cute.autovec_copy(rounded, parts[None, chunk])
