// SPDX-License-Identifier: Apache-2.0
// The consumer warpgroups of a full row tile, taking tiles by turns: one of them has the scores and the softmax of a
// tile, then both multiply its values. P travels through shared memory. For few row tiles, where loading is what takes
// time.
#pragma once

#include "wide_rows.cuh"

namespace tokenspeed::mla {

class WideConsumer : public WideRows {
  public:
    using WideRows::WideRows;

    __device__ void run(const Span& first) {
        each_item(first, [this](const QuerySpan& query, const Span& span, int& unit) {
#pragma unroll 1
            for (int t = 0; t < span.num_tiles; ++t, unit += kTileUnits) {
                const bool owner = (t & 1) == group_;
                sync_both();  // all are past the last product: its P may go
                if (owner) own_tile(query, (span.first_tile + t) * kTileTokens, unit);
                sync_both();
                if (!owner) adopt_maximum();
                multiply_values(unit);
            }
        });
    }

  private:
    __device__ void own_tile(const QuerySpan& query, int first_token, int unit) {
        float scores[32];
        issue_scores(scores, unit);
        ptx::mma_wait<0>();
        if (first_token + kTileTokens > seq_len_ - query.query_tokens + 1) mask(scores, query, first_token);
        raise_maximum(scores);
        uint32_t probs[4][4];
        exponentiate(scores, probs);
        store_probabilities(probs, shared_.probs(0));
        if (first_token + kTileTokens > seq_len_) clear_values(seq_len_ - first_token, unit);
        ptx::fence_async();
    }

    __device__ void adopt_maximum() {
        const float low = row_max_[row(0)], high = row_max_[row(1)];
        if (__any_sync(~0u, low != max_[0] || high != max_[1])) rescale(low, high);
    }

    __device__ void multiply_values(int unit) {
        const uint64_t probs = ptx::operand_descriptor(shared_.probs(0)), values = value_operand(unit);
        ptx::mma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::mma_values(out_, probs + 2 * k, values + k * (2048 >> 4));
        ptx::mma_commit();
        ptx::mma_wait<0>();
        release<0, kTileUnits>(unit);
    }

    // A row sees the request's tokens up to its own.
    __device__ void mask(float (&scores)[32], const QuerySpan& query, int first_token) {
        const int last = seq_len_ - (query.query_tokens - 1 - place_.token_in_request) - first_token - 2 * c_;
        const int low = last + map_.token(row(0)), high = last + map_.token(row(1));
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (8 * j >= low) scores[4 * j] = -INFINITY;
            if (8 * j + 1 >= low) scores[4 * j + 1] = -INFINITY;
            if (8 * j >= high) scores[4 * j + 2] = -INFINITY;
            if (8 * j + 1 >= high) scores[4 * j + 3] = -INFINITY;
        }
    }

    __device__ void raise_maximum(const float (&scores)[32]) {
        float top[2];
        find_maximum(scores, top);
        if (__any_sync(~0u, top[0] != max_[0] || top[1] != max_[1])) rescale(top[0], top[1]);
    }

    __device__ void rescale(float low, float high) {
        const float a = low == -INFINITY ? 1.0f : ptx::exp2_fast(max_[0] - low);
        const float b = high == -INFINITY ? 1.0f : ptx::exp2_fast(max_[1] - high);
        max_[0] = low;
        max_[1] = high;
        sum_[0] *= a;
        sum_[1] *= b;
#pragma unroll
        for (int i = 0; i < 128; ++i) out_[i] *= i & 2 ? b : a;
    }
};

}  // namespace tokenspeed::mla
