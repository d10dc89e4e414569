// SPDX-License-Identifier: Apache-2.0
// Launch parameters of the kernel that makes keys and values of paged latents, and the sizes that its files share.
#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

namespace tokenspeed::unfold {

constexpr int kLatent = 512;      // dims that keys and values are made of
constexpr int kRope = 64;         // dims behind them, which stay as they are
constexpr int kDims = 128;        // of the keys without rope, and of the values: what a task makes
constexpr int kTileTokens = 128;  // of one request
constexpr int kMinPageTokens = 16;
constexpr int kClusterBlocks = 2;

// Up to kTileTokens tokens of a request, one behind the other. A tile without tokens fills up the last cluster.
struct alignas(16) Tile {
    int32_t row;       // of its first token among those of the batch
    int32_t request;   // row of the block table
    int32_t position;  // of its first token in the request, a multiple of kTileTokens
    int32_t tokens;
};

// Everything a launch needs; mirrored field by field in abi.py. Strides count elements.
struct Params {
    const __nv_bfloat16* kv_cache;  // [pages, page tokens, 576]
    const __nv_bfloat16* weights;   // [heads, 256, 512], packed
    __nv_bfloat16* rows;            // [2 heads, tokens, 192]: keys of a head and their rope part, then its values
    const int32_t* block_table;     // [requests, pages of a request]
    const Tile* tiles;              // as many as the clusters of a whole batch have blocks
    int64_t page_stride, token_stride, row_stride, row_token_stride, table_stride;
    int32_t num_tokens, num_heads, num_pages, num_tiles, page_shift;
    int32_t clusters;    // of two blocks, as many as run at once
    int32_t write_rope;  // 0: the rope part is in place already
};

}  // namespace tokenspeed::unfold
