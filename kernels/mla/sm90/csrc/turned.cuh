// SPDX-License-Identifier: Apache-2.0
// The consumer warpgroups of a row tile of 32 or 64 rows with an e4m3 cache. Query rows lie on the M side of the
// scores, where a row's maximum is at hand, and on the N side of the output, where V^T comes from registers:
//
//   S[64 rows x 64 tokens]    = Q[64 x 576]    K^T[576 x 64]      by the warpgroup that owns the tile; e4m3
//   O^T[256 dims x rows]     += V^T[256 x 64]  P^T[64 x rows]     by both, each one half of the latent dims; fp16
//
// The warpgroups own tiles by turns. While one of them has scores and softmax of a tile, the other one multiplies the
// two tiles before, so that neither waits for the other. Of 32 rows the scores' other 32 rows are left alone.
//
// Thread (warp w, lane 4g + c) holds rows 16w + g and 16w + g + 8 of the scores; of the output dims 16w + 2g and the
// next of each 64, rows 8j + 2c and 8j + 2c + 1.
#pragma once

#include "turned_output.cuh"

namespace tokenspeed::mla {

template <int kRows>
class TurnedConsumer {
  public:
    using L = Layout<kRows>;
    static constexpr int kScoreWarps = kRows / 16;  // warps whose scores are those of rows
    static constexpr float kRescaleLog2 = 8.0f;     // the maximum may lag by 2^8 before O is rescaled

    __device__ TurnedConsumer(const DecodeParams& p, const SharedMap<kRows>& shared, const Place& place, char* generic)
        : p_(p),
          shared_(shared),
          place_(place),
          map_(generic),
          generic_(generic),
          states_(generic),
          output_(p, shared, place, generic),
          group_(ptx::warp_number() / 4),
          thread_(threadIdx.x & 127),
          warp_(ptx::warp_number() & 3),
          g_((threadIdx.x & 31) / 4),
          c_(threadIdx.x & 3),
          scale_(p.softmax_scale * 1.4426950408889634f * *p.query_scale * *p.kv_scale) {
#pragma unroll
        for (int i = 0; i < 2; ++i) used_[i] = warp_ < kScoreWarps && row(i) < p.tile_heads * p.tile_query_tokens;
    }

    __device__ void run(Span span) {
        SharedRequest head, tail;  // requests that this block shares with later and with earlier groups
        int unit = 0, item = 0;
        for (bool more = span.begin(); more; more = span.next(p_), ++item) {
            seq_len_ = span.seq_len;
            const QuerySpan query(p_, place_, span.request);
            SharedRequest shared;
            if (!span.whole) shared.open(p_, place_, span.request);
            output_.clear();
            max_[0] = max_[1] = -INFINITY;
            sum_[0] = sum_[1] = 0.0f;
            ptx::barrier_wait(shared_.query_full(), item & 1);
            multiply_tiles(query, span, unit);
            unit += span.num_tiles;
            finish(span, query);
            if (span.whole) continue;
            sync_both();
            if (threadIdx.x == 0) shared.arrive(p_, place_);
            if (span.first_tile == 0) {
                head = shared;
            } else {
                tail = shared;
            }
        }
        const Merger<kRows> merger(p_, place_, generic_);
        if (tail.request >= 0) merger.merge(tail);
        if (head.request >= 0) merger.merge(head);
    }

  private:
    __device__ int row(int i) const { return warp_ * 16 + g_ + 8 * i; }
    __device__ void sync_group() { ptx::named_sync(1 + group_, 128); }
    __device__ void sync_both() { ptx::named_sync(3, kConsumerThreads); }
    // The owner of a tile arrives once its P is there; the other one waits before it needs maxima or P.
    __device__ void announce() { ptx::named_arrive(4 + group_, kConsumerThreads); }
    __device__ void await_other() { ptx::named_sync(5 - group_, kConsumerThreads); }

    __device__ void multiply_tiles(const QuerySpan& query, const Span& span, int unit) {
        const int last = span.num_tiles - 1;
#pragma unroll 1
        for (int t = (group_ ^ unit) & 1; t <= last; t += 2) {
            float scores[32];
            issue_scores(scores, unit + t);
            ptx::mma_wait<0>();  // not <1> first: the compiler would serialize all products
            ptx::mma_settle(scores);
            output_.settle();
            if (t > 1) output_.release_late(unit + t - 2);
            // Behind either barrier all warps are past the scores: P may lie where the rope rows were.
            t > 0 ? await_other() : sync_group();
            publish(scores, query, (span.first_tile + t) * kTileTokens, unit + t, t == 0);
            announce();
            if (t > 0) output_.template multiply<false>(unit + t - 1, -1);
            sync_group();
            output_.template multiply<true>(unit + t, t > 0 ? unit + t - 1 : -1);
        }
        if (((group_ ^ unit ^ last) & 1) != 0) {
            await_other();
            output_.template multiply<false>(unit + last, last > 0 ? unit + last - 1 : -1);
        }
        ptx::mma_wait<0>();
        output_.settle();
        output_.release_late(unit + last);
    }

    __device__ void issue_scores(float (&scores)[32], int unit) {
        constexpr int kQueryBlock = kRows * kRowBytes >> 4, kKeyBlock = kBlockBytes >> 4;
        const uint64_t keys = ptx::operand_descriptor(shared_.unit(unit));
        const uint64_t queries = ptx::operand_descriptor(shared_.query());
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            ptx::barrier_wait(shared_.full(unit, part), shared_.phase(unit));
            ptx::mma_fence();
            const int first = 2 * (group_ ^ part);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                ptx::mma_fp8(scores, queries + (first + k / 4) * kQueryBlock + 2 * (k % 4),
                             keys + (first + k / 4) * kKeyBlock + 2 * (k % 4), (part | k) != 0);
            }
        }
#pragma unroll
        for (int k = 0; k < 2; ++k)
            ptx::mma_fp8(scores, queries + 4 * kQueryBlock + 2 * k, keys + 4 * kKeyBlock + 2 * k, 1);
        ptx::mma_commit();
    }

    // Softmax of a tile: its P, the maxima in use, and what they did to those before.
    __device__ void publish(const float (&scores)[32], const QuerySpan& query, int first_token, int unit, bool first) {
        if (warp_ < kScoreWarps) {
            uint32_t probs[4][4];
            float factor[2];
            bool raised;
            if (first_token + kTileTokens > seq_len_ - query.query_tokens + 1) {
                float visible[32];
                mask(scores, visible, query, first_token);
                raised = raise_maximum(visible, factor, first);
                exponentiate(visible, probs);
            } else {
                raised = raise_maximum(scores, factor, first);
                exponentiate(scores, probs);
            }
            store_probabilities(probs, output_.shared_probs(unit));
            if (c_ == 0) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    states_.maxima[row(i)] = max_[i];
                    states_.factors[(unit & 3) * kRows + row(i)] = factor[i];
                }
            }
            if ((threadIdx.x & 31) == 0) reinterpret_cast<int*>(states_.raised + (unit & 3))[warp_] = raised;
        } else if ((threadIdx.x & 31) == 0) {
            reinterpret_cast<int*>(states_.raised + (unit & 3))[warp_] = 0;
        }
        if (first_token + kTileTokens > seq_len_) clear_values(seq_len_ - first_token, unit);
        ptx::fence_async();
    }

    // A row sees the request's tokens up to its own.
    __device__ void mask(const float (&scores)[32], float (&visible)[32], const QuerySpan& query, int first_token) {
        const int last = seq_len_ - (query.query_tokens - 1 - place_.token_in_request) - first_token - 2 * c_;
        const int end[2] = {last + map_.token(row(0)), last + map_.token(row(1))};
#pragma unroll
        for (int i = 0; i < 32; ++i) visible[i] = i / 4 * 8 + (i & 1) < end[i / 2 & 1] ? scores[i] : -INFINITY;
    }

    // Takes over the maxima of the tile before and raises them where a score outruns them by 2^8; true where O has to
    // be scaled by `factor`.
    __device__ bool raise_maximum(const float (&scores)[32], float (&factor)[2], bool first) {
        bool raised = false;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float before = first ? -INFINITY : states_.maxima[row(i)];
            float part[8];  // a tree, not a chain of 16
#pragma unroll
            for (int j = 0; j < 8; ++j) part[j] = fmaxf(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]);
#pragma unroll
            for (int step = 4; step > 0; step /= 2) {
#pragma unroll
                for (int j = 0; j < step; ++j) part[j] = fmaxf(part[j], part[j + step]);
            }
            float top = fmaxf(part[0], __shfl_xor_sync(~0u, part[0], 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2)) * scale_;
            top = used_[i] && top > before + kRescaleLog2 ? top : before;
            factor[i] = first || top == before ? 1.0f : ptx::exp2_fast(before - top);
            if (top != max_[i]) sum_[i] *= ptx::exp2_fast(max_[i] - top);
            max_[i] = top;
            raised |= factor[i] != 1.0f;
        }
        return __any_sync(~0u, raised);
    }

    __device__ void exponentiate(const float (&scores)[32], uint32_t (&probs)[4][4]) {
        const float low = max_[0] == -INFINITY ? 0.0f : -max_[0], high = max_[1] == -INFINITY ? 0.0f : -max_[1];
        float sums[8] = {};
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const float base = i & 1 ? high : low;
            const float a = ptx::exp2_fast(fmaf(scores[2 * i], scale_, base));
            const float b = ptx::exp2_fast(fmaf(scores[2 * i + 1], scale_, base));
            sums[i & 7] += a + b;
            probs[i / 4][i & 3] = ptx::pack_fp16(a, b);
        }
        sum_[0] += (sums[0] + sums[2]) + (sums[4] + sums[6]);
        sum_[1] += (sums[1] + sums[3]) + (sums[5] + sums[7]);
    }

    // K-major rows of 64 tokens.
    __device__ void store_probabilities(const uint32_t (&probs)[4][4], uint32_t address) {
        const int lane = threadIdx.x & 31, r = lane & 7, matrix = lane >> 3;
        const uint32_t line = address + (warp_ * 16 + (matrix & 1) * 8 + r) * 128;
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::store_fragments(line + (((2 * k + (matrix >> 1)) ^ r) << 4), probs[k]);
        __syncwarp();  // the other lanes have read the maxima of the tile before
    }

    // Rows past the end of the sequence may hold anything, NaN included, and 0 x NaN would reach O.
    __device__ void clear_values(int valid, int unit) {
#pragma unroll 1
        for (int block = 0; block < kLatent / kBlockDims; ++block) {
            const uint32_t base = shared_.unit(unit) + block * kBlockBytes;
#pragma unroll 1
            for (int at = valid * 128 + thread_ * 16; at < kBlockBytes; at += 128 * 16) ptx::store_zeros(base + at);
        }
    }

    // Normalizes and writes O and LSE, whole or as a partial of the merge.
    __device__ void finish(const Span& span, const QuerySpan& query) {
        if ((threadIdx.x & 31) == 0) ptx::barrier_arrive(shared_.query_empty());
        join_sums();
        if (span.whole) {
            output_.write_whole(query);
        } else {
            const int slot = (2 * place_.group + (span.first_tile == 0 ? 1 : 0)) * p_.head_tiles * p_.token_tiles;
            output_.write_partial(slot + place_.row_tile);
        }
        sync_both();  // before the next item's maxima and sums
    }

    // Each warpgroup's sums of its tiles, on the last maxima.
    __device__ void join_sums() {
        if (warp_ < kScoreWarps) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float top = states_.maxima[row(i)];
                if (top != max_[i]) sum_[i] *= ptx::exp2_fast(max_[i] - top);
                sum_[i] += __shfl_xor_sync(~0u, sum_[i], 1);
                sum_[i] += __shfl_xor_sync(~0u, sum_[i], 2);
                if (c_ == 0) states_.sums[group_ * kRows + row(i)] = sum_[i];
            }
        }
        sync_both();
    }

    const DecodeParams& p_;
    const SharedMap<kRows>& shared_;
    const Place& place_;
    RowMap<kRows> map_;
    char* generic_;
    TurnedStates<kRows> states_;
    TurnedOutput<kRows> output_;
    int group_, thread_, warp_, g_, c_;
    float scale_;  // softmax scale in base 2
    float max_[2], sum_[2];
    bool used_[2];
    int seq_len_ = 0;
};

}  // namespace tokenspeed::mla
