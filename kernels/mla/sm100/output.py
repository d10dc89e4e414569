# SPDX-License-Identifier: Apache-2.0
"""The output in tensor memory: rescaled in place, or taken out, divided by the row sums and written."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import tcgen05

from tokenspeed_plugin.kernels.mla.sm100.arithmetic import partial_slot
from tokenspeed_plugin.kernels.mla.sm100.block import Block
from tokenspeed_plugin.kernels.mla.sm100.formulas import LN_2
from tokenspeed_plugin.kernels.mla.sm100.layout import LATENT_SLOTS_OF_TILE, ROW_COUNTS, SLOT_DIMS

CHUNK_ROWS = 16
"""Rows of the output that a thread holds in registers at a time."""


def chunk_copies(block: Block, first: Any, slot: Any, thread: Any) -> tuple[Any, Any, Any]:
    """Load and store of one slot's output, and this thread's part: (rows of a chunk, 1, chunk)."""
    output = block.output(first, slot)[((None, None), 0, 0)]
    repeat = tcgen05.Repetition(CHUNK_ROWS)
    load = tcgen05.make_tmem_copy(cute.make_copy_atom(tcgen05.Ld32x32bOp(repeat), Float32), output)
    store = tcgen05.make_tmem_copy(cute.make_copy_atom(tcgen05.St32x32bOp(repeat), Float32), output)
    return load, store, load.get_slice(thread).partition_S(output)


def chunk_registers(block: Block, thread: Any, load: Any) -> Any:
    """Registers for one chunk."""
    places = load.get_slice(thread).partition_D(cute.make_identity_tensor((SLOT_DIMS, block.layout.rows)))
    return cute.make_rmem_tensor(places[(None, None, 0)].shape, Float32)


@cute.jit
def rescale_output(block: Block, first: cute.Pointer, thread: Int32, factors: cute.Tensor) -> None:
    """Multiplies each row of the output by its factor."""
    for slot in cutlass.range(LATENT_SLOTS_OF_TILE):
        load, store, places = chunk_copies(block, first, slot, thread)
        values = chunk_registers(block, thread, load)
        for chunk in cutlass.range(block.layout.rows // CHUNK_ROWS):
            cute.copy(load, places[(None, None, chunk)], values)
            cute.arch.fence_view_async_tmem_load()
            for number in cutlass.range_constexpr(CHUNK_ROWS):
                values[number] = values[number] * factors[chunk * CHUNK_ROWS + number]
            cute.copy(store, values, places[(None, None, chunk)])
    cute.arch.fence_view_async_tmem_store()


@cute.jit
def write_rows(rows: Any, first: cute.Pointer, item: Any, whole: Boolean) -> None:
    """The rows of a finished request, or the group's part of them for the merge."""
    block = rows.block
    slot = Int32(0)
    if not whole:
        slot = partial_slot(
            block.group,
            cutlass.select_(item.first_tile == 0, Int32(1), Int32(0)),
            block.row_tile,
            block.tiles.row_tiles,
        )
    write_output(block, first, item, whole, slot, rows.thread, rows.factors)
    write_lse(rows, item, whole, slot)


@cute.jit
def write_output(
    block: Block, first: cute.Pointer, item: Any, whole: Boolean, slot: Int32, thread: Int32, factors: cute.Tensor
) -> None:
    """Each thread writes one dim of every row: 32 lanes, 32 dims in a row."""
    for part in cutlass.range(LATENT_SLOTS_OF_TILE):
        load, _, places = chunk_copies(block, first, part, thread)
        values = chunk_registers(block, thread, load)
        dim = part * SLOT_DIMS + thread
        for chunk in cutlass.range(block.layout.rows // CHUNK_ROWS):
            cute.copy(load, places[(None, None, chunk)], values)
            cute.arch.fence_view_async_tmem_load()
            row = chunk * CHUNK_ROWS
            for number in cutlass.range_constexpr(CHUNK_ROWS):
                values[number] = values[number] * factors[row + number]
            if whole:
                write_whole(block, item, values, row, dim)
            else:
                write_part(block, values, slot * block.layout.rows + row, dim)


@cute.jit
def write_whole(block: Block, item: Any, values: cute.Tensor, row: Int32, dim: Int32) -> None:
    """A chunk of the rows of a request that this group has alone."""
    a, tiles = block.arguments, block.tiles
    start, out = a.query_starts[item.request] + block.first_token, a.out
    tokens = cutlass.min(item.query_tokens - block.first_token, tiles.query_tokens)
    for number in cutlass.range_constexpr(CHUNK_ROWS):
        token, head = (row + number) // tiles.heads, block.first_head + (row + number) % tiles.heads
        if token < tokens and head < block.variant.num_heads:
            out[start + token, head, dim] = values[number].to(BFloat16)


@cute.jit
def write_part(block: Block, values: cute.Tensor, row: Int32, dim: Int32) -> None:
    """A chunk of the rows of a request that other groups work on, too."""
    partial = block.arguments.partial_out
    for number in cutlass.range_constexpr(CHUNK_ROWS):
        partial[row + number, dim] = values[number].to(partial.element_type)


@cute.jit
def write_lse(rows: Any, item: Any, whole: Boolean, slot: Int32) -> None:
    """By the four lanes that hold all rows between them; natural for the caller, base 2 for the merge."""
    block, top = rows.block, rows.top
    a, tiles = block.arguments, block.tiles
    lse, partial = a.lse, a.partial_lse
    start = a.query_starts[item.request] + block.first_token
    if rows.thread < 4:
        for pair, step in rows.steps():
            row = rows.row(pair, step)
            token, head = row // tiles.heads, block.first_head + row % tiles.heads
            if not whole:
                partial[slot * block.layout.rows + row] = top[pair, step]
            else:
                real = token < tiles.query_tokens and block.first_token + token < item.query_tokens
                if real and head < block.variant.num_heads:
                    lse[start + token, head] = top[pair, step] * LN_2


def partial_element(rows: int) -> Any:
    """Type of partial outputs: bf16 where fp32 would outweigh the KV itself (64 rows: as much as 114 tokens)."""
    return BFloat16 if rows == ROW_COUNTS[-1] else Float32
