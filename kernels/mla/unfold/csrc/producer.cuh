// SPDX-License-Identifier: Apache-2.0
// What the first warpgroup does: brings latents and weights, and spreads the rope part over the heads.
#pragma once

#include "layout.cuh"
#include "ptx_cluster.cuh"

namespace tokenspeed::unfold {

// Latents of a tile as boxes: parts of pages, or a part of one, none past the request's last page.
class TilePages {
  public:
    __device__ __forceinline__ TilePages(const Params& p, const Tile& tile)
        : box_tokens_(min(1 << p.page_shift, kTileTokens)),
          boxes_((tile.tokens + box_tokens_ - 1) / box_tokens_),
          first_(tile.position & ((1 << p.page_shift) - 1)) {
        const int32_t* table = p.block_table + tile.request * p.table_stride + (tile.position >> p.page_shift);
#pragma unroll
        for (int i = 0; i < kMost; ++i) pages_[i] = i < boxes_ ? __ldg(table + i) : 0;
    }

    // One thread: copies a piece, of all tokens of a tile one line.
    __device__ __forceinline__ void copy(const CUtensorMap* cache, uint32_t shared, uint32_t barrier, int piece) const {
        const int box_bytes = box_tokens_ * kLineBytes;
        if (boxes_ == 0) {
            ptx::barrier_arrive(barrier);
            return;
        }
        ptx::barrier_expect(barrier, boxes_ * box_bytes);
#pragma unroll
        for (int i = 0; i < kMost; ++i) {
            if (i < boxes_) {
                ptx::copy_box(shared + i * box_bytes, cache, barrier, piece * kLine, first_, pages_[i]);
            }
        }
    }

  private:
    static constexpr int kMost = kTileTokens / kMinPageTokens;
    int box_tokens_, boxes_;
    int first_;  // token of its page; not 0 only where a page has several tiles, so one box each
    int32_t pages_[kMost];
};

// One thread: a tile's latents piece by piece in front of the first task's weights, then weights of task after task.
// Each block of a cluster brings half of every piece of weights to both: 64 of its 128 rows.
__device__ __forceinline__ void produce(const Params& p, const CUtensorMap* cache, const CUtensorMap* weights,
                                        uint32_t shared, const Barriers& barriers, int rank) {
    constexpr int kHalfRows = kPieceRows / kClusterBlocks;
    const int tasks = 2 * p.num_heads;
    bool first_fill = true;
    int round = 0;
    for (int at = blockIdx.x; at < p.num_tiles; at += kClusterBlocks * p.clusters, ++round) {
        const TilePages pages(p, p.tiles[at]);
        ptx::barrier_wait(barriers.latents_free, (round & 1) ^ 1);
        for (int task = 0; task < tasks; ++task) {
            for (int piece = 0; piece < kPieces; ++piece) {
                if (task == 0) {
                    pages.copy(cache, shared + kLatentsAt + piece * kPieceBytes, barriers.latents + 8 * piece, piece);
                }
                const int stage = piece % kStages;
                // The fill before it was half a task ago: of the other parity.
                if (!first_fill || piece >= kStages) {
                    ptx::barrier_wait(barriers.weights_free + 8 * stage, ((piece / kStages) & 1) ^ 1);
                }
                ptx::barrier_expect(barriers.weights + 8 * stage, kPieceBytes);
                const uint32_t to = shared + kWeightsAt + stage * kPieceBytes + rank * kHalfRows * kLineBytes;
                ptx::copy_to_both(to, weights, barriers.weights + 8 * stage, piece * kLine,
                                  task * kDims + rank * kHalfRows, 0);
            }
            first_fill = false;
        }
    }
}

constexpr int kRopeThreads = 64;  // two warps

// kRopeThreads threads: the rope part of a tile's tokens goes behind the keys of all heads, from registers.
__device__ __forceinline__ void spread_rope(const Params& p, int thread) {
    constexpr int kChunks = 2 * kRope / sizeof(uint4), kStep = kRopeThreads / kChunks;
    constexpr int kHeld = 8;  // chunks of a thread, half a tile's: a whole tile's would cost the other warps registers
    const int chunk = thread % kChunks;
    for (int at = blockIdx.x; at < p.num_tiles; at += kClusterBlocks * p.clusters) {
        const Tile tile = p.tiles[at];
        const int32_t* table = p.block_table + tile.request * p.table_stride;
        for (int first = thread / kChunks; first < tile.tokens; first += kHeld * kStep) {
            uint4 rope[kHeld];
#pragma unroll
            for (int i = 0; i < kHeld; ++i) {
                const int token = first + i * kStep;
                if (token >= tile.tokens) continue;
                const int position = tile.position + token, slot = position & ((1 << p.page_shift) - 1);
                const int32_t page = __ldg(table + (position >> p.page_shift));
                const __nv_bfloat16* from = p.kv_cache + page * p.page_stride + slot * p.token_stride + kLatent;
                rope[i] = __ldg(reinterpret_cast<const uint4*>(from) + chunk);
            }
            for (int head = 0; head < p.num_heads; ++head) {
                __nv_bfloat16* keys = p.rows + 2 * head * p.row_stride + tile.row * p.row_token_stride + kDims;
#pragma unroll
                for (int i = 0; i < kHeld; ++i) {
                    const int token = first + i * kStep;
                    auto* to = reinterpret_cast<uint4*>(keys + token * p.row_token_stride) + chunk;
                    if (token < tile.tokens) *to = rope[i];
                }
            }
        }
    }
}

}  // namespace tokenspeed::unfold
