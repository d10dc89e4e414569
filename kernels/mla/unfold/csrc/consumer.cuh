// SPDX-License-Identifier: Apache-2.0
// What the two other warpgroups do, in turns: one multiplies a tile with a task's weights while the other one stores.
//
// A task is the keys of a head, or its values: rows of W for 128 dims. Even tasks are the first group's, odd ones the
// second's.
#pragma once

#include "layout.cuh"
#include "ptx_cluster.cuh"

namespace tokenspeed::unfold {

constexpr int kHalves = 2;  // of a tile's tokens, 64 each: what an instruction takes
constexpr int kWarps = 4;   // of a group
enum NamedBarrier { kTurn = 1, kTogether = kTurn + kGroups };

// Of a stage: every warp tells both blocks, since both bring its next weights.
__device__ __forceinline__ void release(uint32_t barrier, int lane) {
    if (lane < kClusterBlocks) ptx::arrive_at(barrier, lane);
}

// sums[tokens x dims] of a task; returns when its instructions are issued, all but the last piece's done.
__device__ __forceinline__ void multiply(float (&sums)[kHalves][64], uint32_t shared, const Barriers& barriers,
                                         bool first_task, int round, int lane) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
        const int stage = piece % kStages;
        if (first_task) ptx::barrier_wait(barriers.latents + 8 * piece, round & 1);
        ptx::barrier_wait(barriers.weights + 8 * stage, (piece / kStages) & 1);
        const uint32_t latents = shared + kLatentsAt + piece * kPieceBytes;
        const uint32_t weights = shared + kWeightsAt + stage * kPieceBytes;
        ptx::mma_fence();
#pragma unroll
        for (int step = 0; step < kLine / 16; ++step) {
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
                const uint32_t tokens = latents + half * (kPieceBytes / kHalves);
                ptx::mma_wide(sums[half], ptx::operand_descriptor(tokens + step * 32),
                              ptx::operand_descriptor(weights + step * 32), piece + step > 0);
            }
        }
        ptx::mma_commit();
        if (piece > 0) {
            ptx::mma_wait<1>();
            release(barriers.weights_free + 8 * ((piece - 1) % kStages), lane);
        }
    }
}

// Puts 64 of the 128 dims of all tokens into shared memory, swizzled as the map of the results has them.
__device__ __forceinline__ void stage_results(const float (&sums)[kHalves][64], uint32_t results, int first_dim,
                                              int warp, int lane) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
        const int row = half * 64 + warp * 16 + lane % 16;
#pragma unroll
        for (int j = 0; j < kLine / 8; j += 2) {  // 8 dims make an 8 x 8 fragment, 16 bytes of a row
            const float* d = &sums[half][4 * (first_dim / 8 + j)];
            const uint32_t fragments[4] = {ptx::pack_bf16(d[0], d[1]), ptx::pack_bf16(d[2], d[3]),
                                           ptx::pack_bf16(d[4], d[5]), ptx::pack_bf16(d[6], d[7])};
            const int column = j + lane / 16;
            ptx::store_fragments(results + row * kLineBytes + ((column ^ (row % 8)) << 4), fragments);
        }
    }
}

// All threads of a group: the rows of a tile that ends with its request. The box of a whole tile would write into the
// request behind it.
__device__ __forceinline__ void store_part(const Params& p, const Tile& tile, uint32_t results, int task, int first_dim,
                                           int thread) {
    constexpr int kChunks = kLineBytes / sizeof(uint4), kStep = 128 / kChunks;
    const int chunk = thread % kChunks;
    __nv_bfloat16* to = p.rows + task * p.row_stride + tile.row * p.row_token_stride + first_dim;
#pragma unroll 1
    for (int row = thread / kChunks; row < tile.tokens; row += kStep) {
        const uint4 bits = ptx::load_shared(results + row * kLineBytes + ((chunk ^ (row % 8)) << 4));
        reinterpret_cast<uint4*>(to + row * p.row_token_stride)[chunk] = bits;
    }
}

__device__ __forceinline__ void consume(const Params& p, const CUtensorMap* rows, uint32_t shared,
                                        const Barriers& barriers, int group, int thread) {
    const int tasks = 2 * p.num_heads, stride = kClusterBlocks * p.clusters;
    const int warp = thread / 32, lane = thread % 32, other = group ^ 1;
    const uint32_t results = shared + kResultsAt + group * kPieceBytes;
    float sums[kHalves][64];
    int round = 0;
    if (group == 1) ptx::named_arrive(kTurn, 256);
    for (int at = blockIdx.x; at < p.num_tiles; at += stride, ++round) {
        for (int task = group; task < tasks; task += kGroups) {
            const bool last_task = task + kGroups >= tasks;
            ptx::named_sync(kTurn + group, 256);
            multiply(sums, shared, barriers, task < kGroups, round, lane);
            // The first group has no turn behind the last one of the second.
            const bool last_turn = group == 1 && last_task && at + stride >= p.num_tiles;
            if (!last_turn) ptx::named_arrive(kTurn + other, 256);
            const Tile tile = p.tiles[at];
            ptx::mma_wait<0>();
#pragma unroll
            for (int half = 0; half < kHalves; ++half) ptx::mma_settle(sums[half]);
            release(barriers.weights_free + 8 * ((kPieces - 1) % kStages), lane);
            if (last_task && lane == 0) ptx::barrier_arrive(barriers.latents_free);
#pragma unroll
            for (int first_dim = 0; first_dim < kDims; first_dim += kLine) {
                if (thread == 0) ptx::wait_sent();
                ptx::named_sync(kTogether + group, 128);
                stage_results(sums, results, first_dim, warp, lane);
                ptx::fence_async();
                ptx::named_sync(kTogether + group, 128);
                if (tile.tokens < kTileTokens) {
                    store_part(p, tile, results, task, first_dim, thread);
                } else if (thread == 0) {
                    ptx::store_box(rows, results, first_dim, tile.row, task);
                }
            }
        }
    }
    if (thread == 0) ptx::wait_stored();
}

}  // namespace tokenspeed::unfold
