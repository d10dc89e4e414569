# SPDX-License-Identifier: Apache-2.0
"""The loading warps: one moves KV boxes with the bulk tensor copy engine, one the query rows."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from tokenspeed_plugin.kernels.mla.geometry import LATENT_DIMS, ROPE_DIMS, TILE_TOKENS
from tokenspeed_plugin.kernels.mla.sm100.arithmetic import (
    box_in_page,
    box_page,
    boxes_of,
    query_offset,
    ring_phase,
    ring_slot,
    tiles_of,
)
from tokenspeed_plugin.kernels.mla.sm100.block import Block
from tokenspeed_plugin.kernels.mla.sm100.layout import (
    ALIGNMENT_BYTES,
    LATENT_SLOTS_OF_TILE,
    SLOT_DIMS,
    SWIZZLE_ROW_BYTES,
)
from tokenspeed_plugin.kernels.mla.sm100.memory import BlockMemory

WARP_LANES, UNIT_BYTES = 32, 16


@cute.jit
def next_request(seq_lens: cute.Tensor, request: Int32) -> Int32:
    """The next request that has tokens; a span that goes on has one."""
    request += 1
    while seq_lens[request] <= 0:
        request += 1
    return request


def kv_boxes(block: Block, ring: str, map_: Any, tensor: Any, dims: int, slot_dims: int) -> tuple[Any, Any]:
    """Destination [box][block of dims][slot] and source [box of the page][block of dims][page] of the bulk copies."""
    variant, layout = block.variant, block.layout
    slots = layout.latent_slots if ring == "latent ring" else layout.rope_slots
    pointer = cute.recast_ptr(
        block.pointer(variant.element, layout.offset(ring), ALIGNMENT_BYTES), variant.box(dims).inner, variant.element
    )
    target = cute.make_tensor(pointer, variant.boxes(dims, slot_dims, slots))
    source = cute.local_tile(tensor, (variant.box_tokens, dims), (None, None, None))
    target_parts, source_parts = cpasync.tma_partition(
        map_, 0, cute.make_layout(1), target, cute.group_modes(source, 0, 2)
    )
    return target_parts, source_parts


@cute.jit
def load_pages(block: Block, pages: cute.Tensor, request: Int32, tile: Int32, valid: Int32) -> None:
    """The pages of a tile's boxes; table entries past the request's last page are never read."""
    box_tokens = block.variant.box_tokens
    table, shift = block.arguments.block_table, block.arguments.page_shift
    for box in cutlass.range_constexpr(TILE_TOKENS // box_tokens):
        if box < boxes_of(valid, box_tokens):
            pages[box] = table[request, box_page(tile, box, box_tokens, shift)]


@cute.jit
def load_slot(
    block: Block,
    map_: Any,
    source: Any,
    target: Any,
    full: Any,
    empty: Any,
    phase: Int32,
    first_block: cutlass.Constexpr,
    blocks: cutlass.Constexpr,
    pages: cute.Tensor,
    tile: Int32,
    boxes: Int32,
    dims: cutlass.Constexpr,
) -> None:
    """One ring slot: waits until it is free, announces the bytes, and starts the boxes of its blocks of dims."""
    box_tokens = block.variant.box_tokens
    cute.arch.mbarrier_wait(empty, phase ^ 1)
    with cute.arch.elect_one():
        box_bytes = box_tokens * dims * block.layout.element_bytes
        cute.arch.mbarrier_arrive_and_expect_tx(full, boxes * (blocks * box_bytes))
    for number in cutlass.range_constexpr(blocks):
        for box in cutlass.range_constexpr(TILE_TOKENS // box_tokens):
            if box < boxes:
                row = box_in_page(tile, box, box_tokens, block.arguments.page_shift)
                cute.copy(
                    map_,
                    source[(None, row, first_block + number, pages[box])],
                    target[(None, box, number)],
                    tma_bar_ptr=full,
                )


@cute.jit
def load_tile(block: Block, rings: Any, tile: Int32, index: Int32, pages: Any, valid: Int32) -> None:
    """All slots of one tile: four of latents, then the rope slot, as the scores read them."""
    layout = block.layout
    (latents_to, latents_from), (ropes_to, ropes_from) = rings
    boxes = boxes_of(valid, block.variant.box_tokens)
    blocks = SLOT_DIMS // layout.block_dims
    for part in cutlass.range_constexpr(LATENT_SLOTS_OF_TILE):
        filling = index * LATENT_SLOTS_OF_TILE + part
        slot = ring_slot(filling, layout.latent_slots)
        load_slot(
            block,
            block.arguments.latents_map,
            latents_from,
            latents_to[(None, None, None, slot)],
            block.barrier("latent full", slot),
            block.barrier("latent empty", slot),
            ring_phase(filling, layout.latent_slots),
            part * blocks,
            blocks,
            pages,
            tile,
            boxes,
            layout.block_dims,
        )
    slot = ring_slot(index, layout.rope_slots)
    load_slot(
        block,
        block.arguments.ropes_map,
        ropes_from,
        ropes_to[(None, None, None, slot)],
        block.barrier("rope full", slot),
        block.barrier("rope empty", slot),
        ring_phase(index, layout.rope_slots),
        LATENT_DIMS // ROPE_DIMS,
        1,
        pages,
        tile,
        boxes,
        ROPE_DIMS,
    )


@cute.jit
def load_kv(block: Block) -> None:
    """The KV warp: every tile of the group's span, in order, as far ahead as the rings reach."""
    a, layout = block.arguments, block.layout
    rings = (
        kv_boxes(block, "latent ring", a.latents_map, a.latents, layout.block_dims, SLOT_DIMS),
        kv_boxes(block, "rope ring", a.ropes_map, a.ropes, ROPE_DIMS, ROPE_DIMS),
    )
    boxes = TILE_TOKENS // block.variant.box_tokens
    pages = cute.make_rmem_tensor((boxes,), Int32)
    ahead = cute.make_rmem_tensor((boxes,), Int32)
    request, tile = a.planned("group_request", block.group), a.planned("group_tile", block.group)
    left, index = a.planned("group_tiles", block.group), Int32(0)
    while left > 0:
        seq_len = a.seq_lens[request]
        last = cutlass.min(tiles_of(seq_len), tile + left)
        left -= last - tile
        load_pages(block, ahead, request, tile, cutlass.min(seq_len - tile * TILE_TOKENS, TILE_TOKENS))
        while tile < last:
            pages.store(ahead.load())
            valid = cutlass.min(seq_len - tile * TILE_TOKENS, TILE_TOKENS)
            if tile + 1 < last:  # their latency hides behind the wait for free slots
                load_pages(
                    block, ahead, request, tile + 1, cutlass.min(seq_len - (tile + 1) * TILE_TOKENS, TILE_TOKENS)
                )
            load_tile(block, rings, tile, index, pages, valid)
            tile += 1
            index += 1
        tile = Int32(0)
        if left > 0:
            request = next_request(a.seq_lens, request)
    drain(block, "latent empty", index * LATENT_SLOTS_OF_TILE, layout.latent_slots)
    drain(block, "rope empty", index, layout.rope_slots)


@cute.jit
def drain(block: BlockMemory, empty: cutlass.Constexpr, filling: Int32, slots: cutlass.Constexpr) -> None:
    """Waits until the products have given back every slot: nothing may arrive in this memory after the block's end."""
    for _ in cutlass.range(slots):
        cute.arch.mbarrier_wait(block.barrier(empty, ring_slot(filling, slots)), ring_phase(filling, slots) ^ 1)
        filling += 1


@cute.jit
def load_queries(block: Block) -> None:
    """The query warp: the rows of each request of the span, once the scores of the one before are done."""
    a = block.arguments
    request, tile = a.planned("group_request", block.group), a.planned("group_tile", block.group)
    left, item = a.planned("group_tiles", block.group), Int32(0)
    while left > 0:
        left -= cutlass.min(tiles_of(a.seq_lens[request]) - tile, left)
        cute.arch.mbarrier_wait(block.barrier("query empty"), (item & 1) ^ 1)
        copy_rows(block, request)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        cute.arch.mbarrier_arrive(block.barrier("query full"))
        item += 1
        tile = Int32(0)
        if left > 0:
            request = next_request(a.seq_lens, request)


@cute.jit
def copy_rows(block: Block, request: Int32) -> None:
    """Rows that the tile does not fill repeat its last one: they are never written out, and finite like it."""
    a, tiles, layout = block.arguments, block.tiles, block.layout
    start = a.query_starts[request]
    last = cutlass.max(a.query_starts[request + 1] - start - 1, 0)
    latent_bytes = layout.rows * LATENT_DIMS * layout.element_bytes
    for row in cutlass.range(layout.rows):
        used = cutlass.min(row, tiles.heads * tiles.query_tokens - 1)
        token = cutlass.min(start + cutlass.min(block.first_token + used // tiles.heads, last), a.num_tokens - 1)
        head = cutlass.min(block.first_head + used % tiles.heads, block.variant.num_heads - 1)
        copy_row(block, a.q_nope, token, head, row, LATENT_DIMS, SWIZZLE_ROW_BYTES, 0)
        copy_row(block, a.q_rope, token, head, row, ROPE_DIMS, block.variant.rope_row_bytes, latent_bytes)


@cute.jit
def copy_row(
    block: Block,
    source: cute.Tensor,
    token: Int32,
    head: Int32,
    row: Int32,
    dims: cutlass.Constexpr,
    row_bytes: cutlass.Constexpr,
    offset: cutlass.Constexpr,
) -> None:
    """One row of one of the query tensors, in units of 16 bytes, one per lane."""
    layout, element = block.layout, block.variant.element
    per_unit = UNIT_BYTES // layout.element_bytes
    units = dims // per_unit
    copy = cute.make_copy_atom(cpasync.CopyG2SOp(), element, num_bits_per_copy=8 * UNIT_BYTES)
    pieces = cute.logical_divide(source[token, head, None], cute.make_layout(per_unit))
    for first in cutlass.range_constexpr(0, units, WARP_LANES):
        unit = first + cute.arch.lane_idx()
        if unit < units:
            at = layout.offset("query") + offset + query_offset(row, unit, layout.rows, row_bytes)
            target = cute.make_tensor(block.pointer(element, at, UNIT_BYTES), cute.make_layout(per_unit))
            cute.copy(copy, pieces[None, unit], target)
