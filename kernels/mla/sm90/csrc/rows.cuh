// SPDX-License-Identifier: Apache-2.0
// From a row of a row tile to its query token, its head and its place in the output.
#pragma once

#include <math.h>

#include "producer.cuh"

namespace tokenspeed::mla {

constexpr float kLn2 = 0.6931471805599453f;
constexpr int kNoRow = 0x7FFF;  // the token of a row that the tile does not fill

// Filled once per block, so that no division stands on the path of a tile.
template <int kRows>
struct RowMap {
    int* entries;

    __device__ explicit RowMap(char* generic)
        : entries(reinterpret_cast<int*>(generic + Layout<kRows>::kRowMapOffset)) {}

    __device__ void fill(const DecodeParams& p, int first, int step) const {
        for (int row = first; row < kRows; row += step) {
            const int token = row / p.tile_heads;
            entries[row] = token < p.tile_query_tokens ? token << 16 | row % p.tile_heads : kNoRow << 16;
        }
    }

    __device__ int token(int row) const { return entries[row] >> 16; }
    __device__ int head(int row) const { return entries[row] & 0xFFFF; }
};

template <int kRows>
struct RowTarget {
    bool exists;
    __nv_bfloat16* out;
    float* lse;

    __device__ RowTarget(const DecodeParams& p, const Place& place, const QuerySpan& query, const RowMap<kRows>& map,
                         int row) {
        const int head = place.first_head + map.head(row);
        exists = map.token(row) < query.tokens && head < p.num_heads;
        const int64_t token = query.first_token + map.token(row);
        out = static_cast<__nv_bfloat16*>(p.out) + token * p.out_token_stride + head * p.out_head_stride;
        lse = p.lse + token * p.num_heads + head;
    }
};

// Zero output and lse -inf for the rows of requests without KV and for tokens past the last request.
template <int kRows>
__device__ void clear_empty_rows(const DecodeParams& p, const Place& place, int thread, int threads) {
    const auto clear = [&](int64_t token, int heads) {
        for (int i = thread; i < heads * (kLatent / 8); i += threads) {
            const int head = place.first_head + i / (kLatent / 8);
            if (head >= p.num_heads) return;
            __nv_bfloat16* out =
                static_cast<__nv_bfloat16*>(p.out) + token * p.out_token_stride + head * p.out_head_stride;
            for (int k = 0; k < 8; ++k) out[i % (kLatent / 8) * 8 + k] = __float2bfloat16(0.0f);
            if (i % (kLatent / 8) == 0) p.lse[token * p.num_heads + head] = -INFINITY;
        }
    };
    for (int request = place.group; request < p.num_requests; request += p.groups) {
        if (p.seq_lens[request] > 0) continue;
        const QuerySpan query(p, place, request);
        for (int token = 0; token < min(query.tokens, p.tile_query_tokens); ++token)
            clear(query.first_token + token, p.tile_heads);
    }
    if (place.token_in_request != 0) return;
    const int used = p.query_starts ? p.query_starts[p.num_requests] : p.num_requests * p.max_query_tokens;
    for (int token = used + place.group; token < p.num_tokens; token += p.groups) clear(token, p.tile_heads);
}

}  // namespace tokenspeed::mla
