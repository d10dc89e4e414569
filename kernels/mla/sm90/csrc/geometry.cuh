// SPDX-License-Identifier: Apache-2.0
// Sizes, shared-memory map and run-time parameters of the Hopper MLA decode kernels.
#pragma once

#include <stdint.h>

namespace tokenspeed::mla {

constexpr int kLatent = 512;
constexpr int kRope = 64;
constexpr int kHeadDim = kLatent + kRope;
constexpr int kTileTokens = 64;
constexpr int kRowBytes = 128;  // one swizzled row of a dim block
#ifdef TOKENSPEED_MLA_FP8
constexpr bool kFp8 = true;
constexpr int kUnitBlocks = 5;  // dim blocks per ring unit: a tile in one unit; half of the last block is zero
#else
constexpr bool kFp8 = false;
constexpr int kUnitBlocks = 3;
#endif
constexpr int kElementBytes = kFp8 ? 1 : 2;
constexpr int kBlockDims = kRowBytes / kElementBytes;
constexpr int kDimBlocks =
    (kHeadDim + kBlockDims - 1) / kBlockDims;  // bf16: eight latent, one rope; FP8: four, and half a one
constexpr int kBlockBytes = kTileTokens * kRowBytes;
constexpr int kTileUnits = kDimBlocks / kUnitBlocks;  // ring units per tile
constexpr int kUnitBytes = kUnitBlocks * kBlockBytes;
constexpr int kSharedLimit = 232448;              // dynamic shared memory of one block on sm_90
constexpr int kConsumerThreads = 256;             // two warpgroups
constexpr int kThreads = kConsumerThreads + 128;  // and the producer's, of which one warp works
constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;

// kRows: folded query rows of a row tile. 16 rows lie on the N side of the products and the two warpgroups take
// alternate KV tiles (consumer.cuh); 64 rows lie on the M side and the warpgroups share every tile (wide_rows.cuh).
// FP8: 32 and 64 rows lie on the M side of the scores and on the N side of the output (turned.cuh).
// From so many row tiles of a request on, and with two that form a cluster, tiles are taken in pairs (wide_paired.cuh).
constexpr int kPairedRowTiles = 4;

template <int kRows>
struct Layout {
    static constexpr bool kWide = kRows == 64 && !kFp8, kTurned = kRows >= 32 && kFp8;
    static constexpr int kQueryBytes = kRows * kDimBlocks * kRowBytes;
    // narrow: two for each warpgroup; turned: none, P lies where its tile's rope rows were
    static constexpr int kProbBuffers = kTurned ? 0 : kWide ? 1 : 4;
    static constexpr int kProbBytes = kRows * kTileTokens * 2;
    // narrow: [buffer][warpgroup][row][warp] and [warpgroup][row]; wide: maxima [row] and sums [warpgroup][row];
    // turned: these, factors [tile % 4][row], and whether there are any, [tile % 4][warp]; 32 bits each
    static constexpr int kReduceBytes = kTurned ? (7 * kRows + 16) * 4 : kWide ? 3 * kRows * 4 : 2 * 2 * kRows * 4 * 4;
    static constexpr int kStateBytes = kWide || kTurned ? 0 : 2 * kRows * 4;
    static constexpr int kRowMapBytes = kRows * 4;  // [row] token and head of the tile
    static constexpr int kBarrierBytes = 256;
    static constexpr int kFixed =
        kQueryBytes + kProbBuffers * kProbBytes + kReduceBytes + kStateBytes + kRowMapBytes + kBarrierBytes;
    static constexpr int kUnits = (kSharedLimit - kFixed) / kUnitBytes;
    static constexpr int kReaders = kWide ? 8 : 4;  // warps that read a unit
    // turned: a unit has an early part, the half of the latent dims that is done with first, and a late one
    static constexpr int kUnitParts = kTurned ? 2 : 1;

    static constexpr int kQueryOffset = 0;
    // FP8: probabilities behind the query, for the halves of O meet in both (consumer.cuh)
    static constexpr int kRingOffset = kQueryBytes + (kFp8 ? kProbBuffers * kProbBytes : 0);
    static constexpr int kProbOffset = kFp8 ? kQueryBytes : kRingOffset + kUnits * kUnitBytes;
    static constexpr int kReduceOffset = kQueryBytes + kProbBuffers * kProbBytes + kUnits * kUnitBytes;
    static constexpr int kStateOffset = kReduceOffset + kReduceBytes;
    static constexpr int kRowMapOffset = kStateOffset + kStateBytes;
    static constexpr int kBarrierOffset = kRowMapOffset + kRowMapBytes;
    static constexpr int kSharedBytes = kBarrierOffset + kBarrierBytes;

    static_assert(kSharedBytes <= kSharedLimit);
    static_assert(kUnits >= 2 * kTileUnits, "the ring holds at least two tiles");
    static_assert(!kWide || kUnits % kTileUnits == 0, "the wide products need a tile in one piece");
    static_assert((2 * kUnits * kUnitParts + 2) * 8 <= kBarrierBytes);
    static_assert(kQueryBytes % 1024 == 0 && kProbBytes % 1024 == 0);
};

// Everything a launch needs; mirrored field by field in abi.py.
struct DecodeParams {
    const void* q_nope;           // [tokens, heads, 512] bf16
    const void* q_rope;           // [tokens, heads, 64] bf16
    const void* kv_cache;         // [pages, page_tokens, 576] bf16
    void* out;                    // [tokens, heads, 512] bf16
    float* lse;                   // [tokens, heads] fp32, natural logarithm; -inf for an empty row
    const int32_t* block_table;   // [requests, block_table_stride]
    const int32_t* seq_lens;      // [requests], the step's new tokens included
    const int32_t* query_starts;  // [requests + 1]; null: every request has max_query_tokens
    const int32_t* plan;          // written by the plan kernel
    void* partial_out;            // [2 * groups, row_tiles, rows * 512] PartialValue
    float* partial_lse;           // [2 * groups, row_tiles, rows], base 2
    int32_t* counters;            // [requests, row_tiles, 4], zero at first; see SharedRequest
    const float* query_scale;     // FP8 only: factors that queries and latents were divided by
    const float* kv_scale;
    int64_t q_nope_token_stride, q_nope_head_stride;  // elements
    int64_t q_rope_token_stride, q_rope_head_stride;
    int64_t kv_page_stride, kv_token_stride;
    int64_t out_token_stride, out_head_stride;
    int64_t block_table_stride;
    int32_t num_requests, num_tokens, num_heads, max_query_tokens;
    int32_t num_pages, page_shift;                // page_tokens = 1 << page_shift
    int32_t rows, tile_heads, tile_query_tokens;  // row tile: tile_query_tokens x tile_heads <= rows
    int32_t head_tiles, token_tiles;              // row tiles of a request
    int32_t groups;                               // blocks per row tile
    int32_t launch_flags;                         // kDependentLaunch, kCooperativeLaunch
    float softmax_scale;
};

constexpr int kDependentLaunch = 1;    // start before the previous kernel has drained
constexpr int kCooperativeLaunch = 2;  // all blocks resident at once, or no launch

// Where the plan's arrays lie inside `plan`.
template <typename Word>
struct PlanView {
    Word* group_request;  // [groups] request in which a group starts
    Word* group_tile;     // [groups] tile of that request
    Word* group_tiles;    // [groups] tiles to do
    Word* group_seq_len;  // [groups] length of that request
    Word* group_page;     // [groups] page of the first tile, when a page holds whole tiles
    Word* first_group;    // [requests]
    Word* last_group;     // [requests] -1: the request has no tokens
    Word* tile_start;     // [requests + 1] tiles before a request

    __host__ __device__ PlanView(Word* plan, int groups, int num_requests)
        : group_request(plan),
          group_tile(plan + groups),
          group_tiles(plan + 2 * groups),
          group_seq_len(plan + 3 * groups),
          group_page(plan + 4 * groups),
          first_group(plan + 5 * groups),
          last_group(first_group + num_requests),
          tile_start(last_group + num_requests) {}
};

// The block's place in the grid: (groups, head tiles, token tiles).
struct Place {
    int group, row_tile, first_head, token_in_request;

    __device__ explicit Place(const DecodeParams& p)
        : group(blockIdx.x),
          row_tile(blockIdx.z * p.head_tiles + blockIdx.y),
          first_head(blockIdx.y * p.tile_heads),
          token_in_request(blockIdx.z * p.tile_query_tokens) {}
};

// The query tokens of one request that fall in this block's row tile.
struct QuerySpan {
    int first_token;   // in the batch
    int tokens;        // of the request, from first_token on; may be none
    int query_tokens;  // of the request

    __device__ QuerySpan(const DecodeParams& p, const Place& place, int request) {
        const int start = p.query_starts ? p.query_starts[request] : request * p.max_query_tokens;
        query_tokens = p.query_starts ? p.query_starts[request + 1] - start : p.max_query_tokens;
        first_token = start + place.token_in_request;
        tokens = query_tokens - place.token_in_request;
    }
};

}  // namespace tokenspeed::mla
