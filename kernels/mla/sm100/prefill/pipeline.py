# SPDX-License-Identifier: Apache-2.0
"""The loading warp and the product warp of the prefill kernel.

  S[128 rows x 128 tokens]  = Q[128 x 192]  K^T[192 x 128]
  O[128 rows x 128 dims]   += P[128 x 128]  V[128 x 128]

The scores of a tile are issued before the output of the tile before it, so that they run while its softmax does.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import cpasync, tcgen05

from tokenspeed_plugin.kernels.mla.sm100.arithmetic import ring_phase, ring_slot
from tokenspeed_plugin.kernels.mla.sm100.layout import ALIGNMENT_BYTES
from tokenspeed_plugin.kernels.mla.sm100.loading import drain
from tokenspeed_plugin.kernels.mla.sm100.memory import fence_after_barrier
from tokenspeed_plugin.kernels.mla.sm100.prefill.block import PrefillBlock
from tokenspeed_plugin.kernels.mla.sm100.prefill.layout import (
    BLOCK_DIMS,
    ELEMENT_BYTES,
    KEY_SLOTS_OF_TILE,
    KV_TILE,
    VALUE_DIMS,
)
from tokenspeed_plugin.kernels.mla.sm100.products import announce, steps_of

BOX_BYTES = KV_TILE * BLOCK_DIMS * ELEMENT_BYTES
VALUE_BOXES = VALUE_DIMS // BLOCK_DIMS


def boxes_of(block: PrefillBlock, part: str, count: int, map_: Any, tensor: Any, start: Any) -> tuple[Any, Any]:
    """Destination [box] and source [tile of tokens][block of dims] of the copies of one head of one request."""
    variant = block.variant
    pointer = cute.recast_ptr(
        block.pointer(block.element, block.layout.offset(part), ALIGNMENT_BYTES), variant.box().inner, block.element
    )
    target = cute.make_tensor(pointer, variant.boxes(count))
    mine = cute.domain_offset((start, 0, 0), tensor)
    source = cute.local_tile(mine, (KV_TILE, BLOCK_DIMS), (None, None, None))[None, None, None, None, block.head]
    target_parts, source_parts = cpasync.tma_partition(
        map_, 0, cute.make_layout(1), target, cute.group_modes(source, 0, 2)
    )
    return target_parts, source_parts


@cute.jit
def expect(full: cute.Pointer, boxes: cutlass.Constexpr) -> None:
    """Announce the bytes of some boxes."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, boxes * BOX_BYTES)


@cute.jit
def load_tokens(block: PrefillBlock) -> None:
    """The query tile, then keys and values tile by tile. Boxes may reach into the next request: its tokens are masked."""
    a, layout = block.arguments, block.layout
    row = block.query_start + block.first_row
    q_to, q_from = boxes_of(block, "query", KEY_SLOTS_OF_TILE, a.q_map, a.q, row)
    k_to, k_from = boxes_of(block, "key ring", layout.key_slots, a.k_map, a.k, block.kv_start)
    v_to, v_from = boxes_of(block, "value ring", layout.value_slots * VALUE_BOXES, a.v_map, a.v, block.kv_start)
    if block.tiles > 0:
        full = block.barrier("query full")
        expect(full, KEY_SLOTS_OF_TILE)
        for part in cutlass.range_constexpr(KEY_SLOTS_OF_TILE):
            cute.copy(a.q_map, q_from[(None, 0, part)], q_to[(None, part)], tma_bar_ptr=full)
    for tile in cutlass.range(block.tiles):
        for part in cutlass.range_constexpr(KEY_SLOTS_OF_TILE):
            filling = tile * KEY_SLOTS_OF_TILE + part
            slot = ring_slot(filling, layout.key_slots)
            full = block.barrier("key full", slot)
            cute.arch.mbarrier_wait(block.barrier("key empty", slot), ring_phase(filling, layout.key_slots) ^ 1)
            expect(full, 1)
            cute.copy(a.k_map, k_from[(None, tile, part)], k_to[(None, slot)], tma_bar_ptr=full)
        slot = ring_slot(tile, layout.value_slots)
        full = block.barrier("value full", slot)
        cute.arch.mbarrier_wait(block.barrier("value empty", slot), ring_phase(tile, layout.value_slots) ^ 1)
        expect(full, VALUE_BOXES)
        for part in cutlass.range_constexpr(VALUE_BOXES):
            cute.copy(a.v_map, v_from[(None, tile, part)], v_to[(None, slot * VALUE_BOXES + part)], tma_bar_ptr=full)
    drain(block, "key empty", block.tiles * KEY_SLOTS_OF_TILE, layout.key_slots)
    drain(block, "value empty", block.tiles, layout.value_slots)


@cute.jit
def multiply_scores(block: PrefillBlock, first: cute.Pointer, operands: Any, tile: Int32) -> None:
    """The scores of one tile, 64 dims at a time as they arrive; each key slot is given back at once."""
    layout, mma = block.layout, block.variant.scores_mma
    queries, keys = operands
    scores = block.scores(first, tile % layout.score_buffers)
    for part in cutlass.range_constexpr(KEY_SLOTS_OF_TILE):
        filling = tile * KEY_SLOTS_OF_TILE + part
        slot = ring_slot(filling, layout.key_slots)
        cute.arch.mbarrier_wait(block.barrier("key full", slot), ring_phase(filling, layout.key_slots))
        fence_after_barrier()
        steps = steps_of(keys)
        for step in cutlass.range_constexpr(steps):
            mma.set(tcgen05.Field.ACCUMULATE, part + step > 0)
            rows = queries[(None, None, part * steps + step, 0)]
            cute.gemm(mma, scores, rows, keys[(None, None, step, slot)], scores)
        announce(block.barrier("key empty", slot))
    announce(block.barrier("scores full", tile % layout.score_buffers))


@cute.jit
def multiply_values(block: PrefillBlock, first: cute.Pointer, operands: Any, tile: Int32, add: Boolean) -> None:
    """Adds one tile to the output."""
    layout, mma = block.layout, block.variant.values_mma
    probabilities, values = operands
    slot, output = ring_slot(tile, layout.value_slots), block.output(first)
    cute.arch.mbarrier_wait(block.barrier("value full", slot), ring_phase(tile, layout.value_slots))
    fence_after_barrier()
    for step in cutlass.range_constexpr(steps_of(values)):
        mma.set(tcgen05.Field.ACCUMULATE, add if step == 0 else True)
        rows = probabilities[(None, None, step, 0)]
        cute.gemm(mma, output, rows, values[(None, None, step, slot)], output)
    announce(block.barrier("value empty", slot))
    announce(block.barrier("values done"))


@cute.jit
def run_products(block: PrefillBlock, first: cute.Pointer) -> None:
    """All tiles of the block."""
    variant, layout = block.variant, block.layout
    score_operands = (
        variant.scores_mma.make_fragment_A(block.operand(layout.offset("query"), variant.queries())),
        variant.scores_mma.make_fragment_B(block.operand(layout.offset("key ring"), variant.keys())),
    )
    value_operands = (
        variant.values_mma.make_fragment_A(block.operand(layout.offset("probabilities"), variant.probabilities())),
        variant.values_mma.make_fragment_B(block.operand(layout.offset("value ring"), variant.values())),
    )
    if block.tiles > 0:
        cute.arch.mbarrier_wait(block.barrier("query full"), 0)
        for number in cutlass.range(block.tiles + 1):
            if number < block.tiles:
                multiply_scores(block, first, score_operands, number)
            if number > 0:
                # Behind it also lie the reads of the scores that the next product overwrites.
                cute.arch.mbarrier_wait(block.barrier("probabilities full"), (number - 1) & 1)
                fence_after_barrier()
                multiply_values(block, first, value_operands, number - 1, number > 1)
