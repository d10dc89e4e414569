// SPDX-License-Identifier: Apache-2.0
// Sizes, shared-memory map and run-time parameters of the Hopper MLA decode kernels.
#pragma once

#include <stdint.h>

namespace tokenspeed::mla {

constexpr int kLatent = 512;
constexpr int kRope = 64;
constexpr int kHeadDim = kLatent + kRope;
constexpr int kTileTokens = 64;
constexpr int kBlockDims = 64;                                // one 128-byte swizzled row
constexpr int kDimBlocks = kHeadDim / kBlockDims;             // 9: eight latent, one rope
constexpr int kBlockBytes = kTileTokens * kBlockDims * 2;     // 64 tokens x 64 dims
constexpr int kUnitBlocks = 3;                                // dim blocks per ring unit
constexpr int kTileUnits = kDimBlocks / kUnitBlocks;          // ring units per tile
constexpr int kUnitBytes = kUnitBlocks * kBlockBytes;         // 24 KiB
constexpr int kSharedLimit = 232448;                          // dynamic shared memory of one block on sm_90
constexpr int kConsumerThreads = 256;                         // two warpgroups
constexpr int kThreads = kConsumerThreads + 128;              // and the producer's, of which one warp works
constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;

// kRows: folded query rows of a row tile. Up to 32 rows, both warpgroups hold all rows and take alternate KV tiles;
// with 64 rows each warpgroup holds 32 of them and both take every tile.
template <int kRows>
struct Layout {
  static constexpr bool kAlternate = kRows < 64;
  static constexpr int kGroupRows = kAlternate ? kRows : 32;
  static constexpr int kQueryBytes = kRows * kHeadDim * 2;
  static constexpr int kProbBuffers = kAlternate ? 2 : 1;
  static constexpr int kProbBytes = kGroupRows * kTileTokens * 2;
  static constexpr int kReduceBytes = 2 * 2 * kGroupRows * 4 * 4;  // [buffer][warpgroup][row][warp] fp32
  static constexpr int kStateBytes = 2 * 2 * kGroupRows * 4;       // [warpgroup][max or sum][row] fp32
  static constexpr int kBarrierBytes = 256;
  static constexpr int kFixed =
      kQueryBytes + 2 * kProbBuffers * kProbBytes + kReduceBytes + kStateBytes + kBarrierBytes;
  static constexpr int kUnits = (kSharedLimit - kFixed) / kUnitBytes;

  static constexpr int kQueryOffset = 0;
  static constexpr int kRingOffset = kQueryBytes;
  static constexpr int kProbOffset = kRingOffset + kUnits * kUnitBytes;
  static constexpr int kReduceOffset = kProbOffset + 2 * kProbBuffers * kProbBytes;
  static constexpr int kStateOffset = kReduceOffset + kReduceBytes;
  static constexpr int kBarrierOffset = kStateOffset + kStateBytes;
  static constexpr int kSharedBytes = kBarrierOffset + kBarrierBytes;

  static_assert(kSharedBytes <= kSharedLimit);
  static_assert(kUnits >= 2 * kTileUnits, "the ring holds at least two tiles");
  static_assert((2 * kUnits + 2) * 8 <= kBarrierBytes);
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
  int32_t* plan;                // written by the plan kernel, read by the others
  float* partial_out;           // [2 * groups, row_tiles, rows * 512]
  float* partial_lse;           // [2 * groups, row_tiles, rows], base 2
  int64_t q_nope_token_stride, q_nope_head_stride;  // elements
  int64_t q_rope_token_stride, q_rope_head_stride;
  int64_t kv_page_stride, kv_token_stride;
  int64_t out_token_stride, out_head_stride;
  int64_t block_table_stride;
  int32_t num_requests, num_tokens, num_heads, max_query_tokens;
  int32_t num_pages, page_tokens;
  int32_t rows, tile_heads, tile_query_tokens, row_tiles;  // row tile: tile_query_tokens x tile_heads <= rows
  int32_t groups;                                          // blocks per row tile
  int32_t dependent_launch;                                // 1: overlap the merge kernel's launch
  float softmax_scale;
};

// Where the plan's arrays lie inside `plan`.
struct PlanView {
  int32_t* group_request;  // [groups] request in which a group starts
  int32_t* group_tile;     // [groups] tile of that request
  int32_t* group_tiles;    // [groups] tiles to do
  int32_t* first_group;    // [requests]
  int32_t* last_group;     // [requests] -1: the request has no tokens

  __host__ __device__ PlanView(int32_t* plan, int groups, int num_requests)
      : group_request(plan),
        group_tile(plan + groups),
        group_tiles(plan + 2 * groups),
        first_group(plan + 3 * groups),
        last_group(plan + 3 * groups + num_requests) {}
};

// The query rows of one (request, row tile).
struct RowTile {
  int first_token, first_head, tokens;  // tokens: query tokens of the request from first_token on
  int seq_len, query_tokens, token_in_request;

  __device__ RowTile(const DecodeParams& p, int request, int tile) {
    const int head_tiles = (p.num_heads + p.tile_heads - 1) / p.tile_heads;
    const int start = p.query_starts ? p.query_starts[request] : request * p.max_query_tokens;
    query_tokens = p.query_starts ? p.query_starts[request + 1] - start : p.max_query_tokens;
    seq_len = p.seq_lens[request];
    token_in_request = (tile / head_tiles) * p.tile_query_tokens;
    first_token = start + token_in_request;
    first_head = (tile % head_tiles) * p.tile_heads;
    tokens = query_tokens - token_in_request;
  }

  // KV tokens that a row may read.
  __device__ int visible(int row, int tile_heads) const {
    return seq_len - (query_tokens - 1 - (token_in_request + row / tile_heads));
  }

  __device__ bool holds(int row, const DecodeParams& p) const {
    const int token = row / p.tile_heads;
    return token < p.tile_query_tokens && token < tokens && first_head + row % p.tile_heads < p.num_heads;
  }
};

}  // namespace tokenspeed::mla
