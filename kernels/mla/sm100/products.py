# SPDX-License-Identifier: Apache-2.0
"""The product warp: issues all tensor-core instructions of a block.

  S^T[64 tokens x rows]  = K[64 x 576]     Q^T[576 x rows]     K, Q from shared memory, S^T into tensor memory
  O^T[512 dims x rows]  += V^T[512 x 64]   P^T[64 x rows]      V is the same shared memory as K, read along its dims

The scores of a tile are issued before the output of the tile before it, so that they run while its softmax does.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import tcgen05

from tokenspeed_plugin.kernels.mla.sm100.arithmetic import ring_phase, ring_slot, tiles_of
from tokenspeed_plugin.kernels.mla.sm100.block import Block
from tokenspeed_plugin.kernels.mla.sm100.layout import LATENT_SLOTS_OF_TILE
from tokenspeed_plugin.kernels.mla.sm100.loading import next_request
from tokenspeed_plugin.kernels.mla.sm100.memory import fence_after_barrier


def steps_of(operand: Any) -> int:
    """Instructions along the summed dimension of an operand's slot."""
    return int(cute.size(operand, mode=[2]))


@cute.jit
def announce(barrier: cute.Pointer) -> None:
    """Arrive on a barrier when the products issued so far are done."""
    with cute.arch.elect_one():
        tcgen05.commit(barrier)


@cute.jit
def multiply_scores(block: Block, first: cute.Pointer, operands: Any, index: Int32) -> None:
    """The scores of one tile: 512 latent dims slot by slot as they arrive, then the rope dims."""
    layout, mma = block.layout, block.variant.scores_mma
    (latents, ropes), (latent_queries, rope_queries) = operands
    scores = block.scores(first, index % layout.score_buffers)
    for part in cutlass.range_constexpr(LATENT_SLOTS_OF_TILE):
        filling = index * LATENT_SLOTS_OF_TILE + part
        slot = ring_slot(filling, layout.latent_slots)
        cute.arch.mbarrier_wait(block.barrier("latent full", slot), ring_phase(filling, layout.latent_slots))
        fence_after_barrier()
        steps = steps_of(latents)
        for step in cutlass.range_constexpr(steps):
            mma.set(tcgen05.Field.ACCUMULATE, part + step > 0)
            queries = latent_queries[(None, None, part * steps + step, 0)]
            cute.gemm(mma, scores, latents[(None, None, step, slot)], queries, scores)
    slot = ring_slot(index, layout.rope_slots)
    cute.arch.mbarrier_wait(block.barrier("rope full", slot), ring_phase(index, layout.rope_slots))
    fence_after_barrier()
    for step in cutlass.range_constexpr(steps_of(ropes)):
        mma.set(tcgen05.Field.ACCUMULATE, True)
        cute.gemm(mma, scores, ropes[(None, None, step, slot)], rope_queries[(None, None, step, 0)], scores)
    announce(block.barrier("rope empty", slot))
    announce(block.barrier("scores full", index % layout.score_buffers))


@cute.jit
def multiply_values(block: Block, first: cute.Pointer, operands: Any, index: Int32, add: Boolean) -> None:
    """Adds one tile to the output, slot by slot; each slot is given back as soon as its product is done."""
    layout, mma = block.layout, block.variant.values_mma
    values, probabilities = operands
    for part in cutlass.range_constexpr(LATENT_SLOTS_OF_TILE):
        slot = ring_slot(index * LATENT_SLOTS_OF_TILE + part, layout.latent_slots)
        output = block.output(first, part)
        for step in cutlass.range_constexpr(steps_of(values)):
            mma.set(tcgen05.Field.ACCUMULATE, add if step == 0 else True)
            cute.gemm(mma, output, values[(None, None, step, slot)], probabilities[(None, None, step, 0)], output)
        announce(block.barrier("latent empty", slot))
    announce(block.barrier("values done"))


@cute.jit
def run_products(block: Block, first: cute.Pointer) -> None:
    """All tiles of the group's span."""
    a = block.arguments
    key_operands = (block.keys(), block.queries())
    value_operands = (block.values(), block.probabilities())
    request, tile = a.planned("group_request", block.group), a.planned("group_tile", block.group)
    left, index, item = a.planned("group_tiles", block.group), Int32(0), Int32(0)
    while left > 0:
        count = cutlass.min(tiles_of(a.seq_lens[request]) - tile, left)
        left -= count
        cute.arch.mbarrier_wait(block.barrier("query full"), item & 1)
        fence_after_barrier()
        for number in cutlass.range(count + 1):
            if number < count:
                multiply_scores(block, first, key_operands, index + number)
            else:
                announce(block.barrier("query empty"))
            if number > 0:
                # Behind it also lie the reads of the scores that the next product overwrites, and of the last output.
                before = index + number - 1
                cute.arch.mbarrier_wait(block.barrier("probabilities full"), before & 1)
                fence_after_barrier()
                multiply_values(block, first, value_operands, before, number > 1)
        index += count
        item += 1
        tile = Int32(0)
        if left > 0:
            request = next_request(a.seq_lens, request)
