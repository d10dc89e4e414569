// SPDX-License-Identifier: Apache-2.0
// The consumer warpgroups of a full row tile, taking tiles in pairs: warpgroup 0 has the scores of the even tiles,
// warpgroup 1 those of the odd ones, so that the tensor core works on one tile while the other is at its softmax. The
// owner's P stays in its registers and goes to the other through shared memory, where the tile's rope rows were. For
// many row tiles, where the products are what takes time.
#pragma once

#include "wide_rows.cuh"

namespace tokenspeed::mla {

class PairedConsumer : public WideRows {
  public:
    using WideRows::WideRows;

    __device__ void run(const Span& first) {
        each_item(first, [this](const QuerySpan& query, const Span& span, int& unit) {
            if (group_ == 0) {
                lead(query, span, unit);
            } else {
                follow(query, span, unit);
            }
            unit += span.num_tiles * kTileUnits;
        });
    }

  private:
    // Warpgroup 0: scores of the even tiles, and its half of both tiles of a pair. It returns each tile as soon as it
    // can: the ring holds two, and what comes next is on its way while the other half is being multiplied.
    __device__ void lead(const QuerySpan& query, const Span& span, int unit) {
#pragma unroll 1
        for (int t = 0; t < span.num_tiles; t += 2, unit += 2 * kTileUnits) {
            const int first_token = (span.first_tile + t) * kTileTokens;
            float scores[32], factor[2];
            uint32_t probs[4][4];
            issue_scores(scores, unit);
            ptx::mma_wait<0>();
            ptx::mma_settle(scores);
            if (soften(scores, probs, factor, query, first_token)) scale_out(factor);
            ptx::named_sync(1, 128);  // all are past the scores: the rope rows may go
            publish(probs, first_token, unit);
            ptx::named_arrive(4, kConsumerThreads);
            multiply_own(probs, unit);
            ptx::mma_wait<0>();
            ptx::mma_settle(out_);
            release<0, kTileUnits>(unit);
            if (t + 1 >= span.num_tiles) break;
            ptx::named_sync(5, kConsumerThreads);
            adopt_maximum();
            wait_full(unit + kTileUnits);
            multiply_other(unit + kTileUnits);
            ptx::mma_wait<0>();
            ptx::mma_settle(out_);
            release<0, kTileUnits>(unit + kTileUnits);
        }
    }

    // Warpgroup 1: scores of the odd tiles, while the other one is at the softmax of the even ones.
    __device__ void follow(const QuerySpan& query, const Span& span, int unit) {
        int t = 0;
#pragma unroll 1
        for (; t + 1 < span.num_tiles; t += 2, unit += 2 * kTileUnits) {
            const int odd = unit + kTileUnits, first_token = (span.first_tile + t + 1) * kTileTokens;
            float scores[32], factor[2];
            uint32_t probs[4][4];
            issue_scores(scores, odd);
            join_even(unit);
            ptx::mma_wait<1>();
            ptx::mma_settle(scores);
            const bool raised = soften(scores, probs, factor, query, first_token);
            ptx::named_sync(2, 128);
            publish(probs, first_token, odd);
            ptx::named_arrive(5, kConsumerThreads);
            ptx::mma_wait<0>();
            ptx::mma_settle(out_);
            release<1, kTileUnits>(unit);
            release<0, 1>(odd);
            if (raised) scale_out(factor);
            multiply_own(probs, odd);
            ptx::mma_wait<0>();
            ptx::mma_settle(out_);
            release<1, kTileUnits>(odd);
        }
        if (t == span.num_tiles) return;
        join_even(unit);
        ptx::mma_wait<0>();
        ptx::mma_settle(out_);
        release<1, kTileUnits>(unit);
    }

    // The upper half of an even tile, by the probabilities of warpgroup 0.
    __device__ void join_even(int unit) {
        ptx::named_sync(4, kConsumerThreads);
        adopt_maximum();
        wait_full(unit);
        release<0, 1>(unit);  // only the lower half of the latent dims
        multiply_other(unit);
    }

    __device__ void adopt_maximum() {
        const float low = row_max_[row(0)], high = row_max_[row(1)];
        float factor[2];
        if (__any_sync(~0u, low != max_[0] || high != max_[1])) {
            set_maximum(low, high, factor);
            ptx::mma_wait<0>();
            scale_out(factor);
        }
    }

    __device__ void wait_full(int unit) const {
#pragma unroll
        for (int u = 0; u < kTileUnits; ++u) ptx::barrier_wait(shared_.full(unit + u), shared_.phase(unit + u));
    }

    // P of a tile lies where its rope rows were.
    __device__ uint32_t probs_at(int unit) const { return shared_.unit(unit + kTileUnits - 1) + 2 * kBlockBytes; }

    __device__ void publish(const uint32_t (&probs)[4][4], int first_token, int unit) {
        store_probabilities(probs, probs_at(unit));
        if (first_token + kTileTokens > seq_len_) {
            clear_values(seq_len_ - first_token, unit);
            ptx::fence_async();
            // this warpgroup's own product reads what its other warps have cleared
            group_ == 0 ? ptx::named_sync(1, 128) : ptx::named_sync(2, 128);
        } else {
            ptx::fence_async();
        }
    }

    __device__ void multiply_own(const uint32_t (&probs)[4][4], int unit) {
        const uint64_t values = value_operand(unit);
        ptx::mma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::mma_values(out_, probs[k], values + k * (2048 >> 4));
        ptx::mma_commit();
    }

    __device__ void multiply_other(int unit) {
        const uint64_t probs = ptx::operand_descriptor(probs_at(unit)), values = value_operand(unit);
        ptx::mma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::mma_values(out_, probs + 2 * k, values + k * (2048 >> 4));
        ptx::mma_commit();
    }

    // From scores to probabilities; true where O has to be scaled by `factor`. What is hidden is replaced in a copy:
    // the compiler serializes products if anything but they writes to their accumulators.
    __device__ bool soften(const float (&scores)[32], uint32_t (&probs)[4][4], float (&factor)[2],
                           const QuerySpan& query, int first_token) {
        bool raised;
        if (first_token + kTileTokens > seq_len_ - query.query_tokens + 1) {
            float visible[32];
            mask(scores, visible, query, first_token);
            raised = raise_maximum(visible, factor);
            exponentiate(visible, probs);
        } else {
            raised = raise_maximum(scores, factor);
            exponentiate(scores, probs);
        }
        return raised;
    }

    // A row sees the request's tokens up to its own.
    __device__ void mask(const float (&scores)[32], float (&visible)[32], const QuerySpan& query, int first_token) {
        const int last = seq_len_ - (query.query_tokens - 1 - place_.token_in_request) - first_token - 2 * c_;
        const int end[2] = {last + map_.token(row(0)), last + map_.token(row(1))};
#pragma unroll
        for (int i = 0; i < 32; ++i) visible[i] = i / 4 * 8 + (i & 1) < end[i / 2 & 1] ? scores[i] : -INFINITY;
    }

    // True where O has to be scaled by `factor`.
    __device__ bool raise_maximum(const float (&scores)[32], float (&factor)[2]) {
        float top[2];
        find_maximum(scores, top);
        if (!__any_sync(~0u, top[0] != max_[0] || top[1] != max_[1])) return false;
        set_maximum(top[0], top[1], factor);
        return true;
    }

    __device__ void set_maximum(float low, float high, float (&factor)[2]) {
        factor[0] = low == -INFINITY ? 1.0f : ptx::exp2_fast(max_[0] - low);
        factor[1] = high == -INFINITY ? 1.0f : ptx::exp2_fast(max_[1] - high);
        max_[0] = low;
        max_[1] = high;
        sum_[0] *= factor[0];
        sum_[1] *= factor[1];
    }

    __device__ void scale_out(const float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < 128; ++i) out_[i] *= factor[i / 2 & 1];
    }
};

}  // namespace tokenspeed::mla
