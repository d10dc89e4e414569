// SPDX-License-Identifier: Apache-2.0
// Keys and values of some heads from paged latents, in one kernel: rows[h] = latents W[h], the rope part beside the
// keys.
//
// A cluster of two blocks has two tiles of 128 tokens. Their latents stay in shared memory while the weights of all
// heads pass; each block brings half of them to both, so that they are read once for 256 tokens. Tiles of a batch are
// those of its requests: none reads or writes past its request's end.
#pragma once

#include "consumer.cuh"
#include "producer.cuh"

namespace tokenspeed::unfold {

__global__ void __launch_bounds__(kThreads, 1)
    unfold_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap cache,
                  const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap rows) {
    extern __shared__ uint8_t raw[];
    const uint32_t shared = (ptx::shared_address(raw) + kAlignment - 1) & ~(kAlignment - 1u);
    const Barriers barriers(shared);
    if (threadIdx.x == 0) {
        for (int piece = 0; piece < kPieces; ++piece) ptx::barrier_init(barriers.latents + 8 * piece, 1);
        ptx::barrier_init(barriers.latents_free, kGroups * kWarps);
        for (int stage = 0; stage < kStages; ++stage) {
            ptx::barrier_init(barriers.weights + 8 * stage, 1);
            // A fill is read by one group in each block.
            ptx::barrier_init(barriers.weights_free + 8 * stage, kClusterBlocks * kWarps);
        }
        ptx::fence_barrier_init();
    }
    ptx::cluster_sync();
    const int group = ptx::warp_number() / kWarps;
    if (group == 0) {
        ptx::shrink_registers<88>();
        const int thread = static_cast<int>(threadIdx.x);
        if (thread == 0) produce(p, &cache, &weights, shared, barriers, ptx::cluster_rank());
        if (thread >= 128 - kRopeThreads && p.write_rope != 0) spread_rope(p, thread - (128 - kRopeThreads));
    } else {
        ptx::grow_registers<208>();
        consume(p, &rows, shared, barriers, group - 1, threadIdx.x % 128);
    }
    // A block stays until its neighbour neither brings it weights nor arrives at its barriers.
    __syncwarp();
    ptx::cluster_sync();
}

}  // namespace tokenspeed::unfold
