// SPDX-License-Identifier: Apache-2.0
// What the two pipelines of a full row tile (wide.cuh, wide_paired.cuh) have in common: 64 query rows lie on the M side
// of the tensor-core instruction.
//
//   S[64 rows x 64 tokens]  = Q[64 x 576] K^T[576 x 64]     by the warpgroup that owns the tile
//   O[64 rows x 256 dims]  += P[64 x 64]  V[64 x 256]       by both, each one half of the latent dims
//
// The row maximum in use is common to both and lags by up to 2^8, so that O is hardly ever rescaled. Thread (warp w,
// lane 4g + c) holds rows 16w + g and 16w + g + 8, columns 8j + 2c and 8j + 2c + 1.
#pragma once

#include "merge.cuh"
#include "ptx_wide.cuh"

namespace tokenspeed::mla {

class WideRows {
  public:
    static constexpr int kRows = 64;
    using L = Layout<kRows>;
    static constexpr int kHalf = kLatent / 2;
    static constexpr float kRescaleLog2 = 8.0f;

    __device__ WideRows(const DecodeParams& p, const SharedMap<kRows>& shared, const Place& place, char* generic)
        : p_(p),
          shared_(shared),
          place_(place),
          map_(generic),
          generic_(generic),
          row_max_(reinterpret_cast<float*>(generic + L::kReduceOffset)),
          row_sum_(row_max_ + kRows),
          group_(ptx::warp_number() / 4),
          thread_(threadIdx.x & 127),
          warp_(ptx::warp_number() & 3),
          g_((threadIdx.x & 31) / 4),
          c_(threadIdx.x & 3),
          scale_(p.softmax_scale * 1.4426950408889634f) {}

  protected:
    // Walks the span; `tiles` multiplies the tiles of one item and takes the ring unit past them.
    template <typename Tiles>
    __device__ void each_item(Span span, const Tiles& tiles) {
        SharedRequest head, tail;  // requests that this block shares with later and with earlier groups
        int unit = 0, item = 0;
        for (bool more = span.begin(); more; more = span.next(p_), ++item) {
            seq_len_ = span.seq_len;
            const QuerySpan query(p_, place_, span.request);
            SharedRequest shared;
            if (!span.whole) shared.open(p_, place_, span.request);
            clear();
            ptx::barrier_wait(shared_.query_full(), item & 1);
            tiles(query, span, unit);
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

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < 128; ++i) out_[i] = 0.0f;
        max_[0] = max_[1] = -INFINITY;
        sum_[0] = sum_[1] = 0.0f;
    }

    __device__ int row(int i) const { return warp_ * 16 + g_ + 8 * i; }
    __device__ void sync_both() { ptx::named_sync(3, kConsumerThreads); }

    // This warpgroup's half of the latent dims, 256 columns in four swizzled blocks.
    __device__ uint64_t value_operand(int unit) const {
        return ptx::operand_descriptor(shared_.unit(unit) + group_ * (kHalf / kBlockDims) * kBlockBytes, kBlockBytes);
    }

    __device__ void issue_scores(float (&scores)[32], int unit) {
#pragma unroll
        for (int u = 0; u < kTileUnits; ++u) {
            ptx::barrier_wait(shared_.full(unit + u), shared_.phase(unit + u));
            ptx::mma_fence();
            const uint64_t keys = ptx::operand_descriptor(shared_.unit(unit + u));
            const uint64_t queries = ptx::operand_descriptor(shared_.query() + u * kUnitBlocks * kRows * 128);
#pragma unroll
            for (int block = 0; block < kUnitBlocks; ++block) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    ptx::mma_scores(scores, queries + block * (kRows * 128 >> 4) + 2 * k,
                                    keys + block * (kBlockBytes >> 4) + 2 * k, (u | block | k) != 0);
                }
            }
        }
        ptx::mma_commit();
    }

    // The rows' maxima as far as they are to be used: those in use, until a score outruns them by 2^8.
    __device__ void find_maximum(const float (&scores)[32], float (&top)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float part[8];  // a tree, not a chain of 16
#pragma unroll
            for (int j = 0; j < 8; ++j) part[j] = fmaxf(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]);
#pragma unroll
            for (int step = 4; step > 0; step /= 2) {
#pragma unroll
                for (int j = 0; j < step; ++j) part[j] = fmaxf(part[j], part[j + step]);
            }
            top[i] = part[0];
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 1));
            top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 2)) * scale_;
            top[i] = top[i] > max_[i] + kRescaleLog2 ? top[i] : max_[i];
        }
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
            probs[i / 4][i & 3] = ptx::pack_bf16(a, b);
        }
        sum_[0] += (sums[0] + sums[2]) + (sums[4] + sums[6]);
        sum_[1] += (sums[1] + sums[3]) + (sums[5] + sums[7]);
    }

    // K-major rows of 64 tokens, and the maxima they were computed with.
    __device__ void store_probabilities(const uint32_t (&probs)[4][4], uint32_t address) {
        const int lane = threadIdx.x & 31, r = lane & 7, matrix = lane >> 3;
        const uint32_t line = address + (warp_ * 16 + (matrix & 1) * 8 + r) * 128;
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::store_fragments(line + (((2 * k + (matrix >> 1)) ^ r) << 4), probs[k]);
        __syncwarp();  // the other lanes have read the maxima of the tile before
        if (c_ == 0) {
            row_max_[row(0)] = max_[0];
            row_max_[row(1)] = max_[1];
        }
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

    // Gives ring units kFirst to kEnd of a tile back.
    template <int kFirst, int kEnd>
    __device__ void release(int unit) const {
        if ((threadIdx.x & 31) == 0) {
#pragma unroll
            for (int u = kFirst; u < kEnd; ++u) ptx::barrier_arrive(shared_.empty(unit + u));
        }
    }

    // Normalizes and writes O and LSE, whole or as a partial of the merge.
    __device__ void finish(const Span& span, const QuerySpan& query) {
        if ((threadIdx.x & 31) == 0) ptx::barrier_arrive(shared_.query_empty());
        float factor[2], lse[2];
        join_sums(factor, lse);
        if (span.whole) {
            write_whole(query, factor, lse);
        } else {
            const int slot = (2 * place_.group + (span.first_tile == 0 ? 1 : 0)) * p_.head_tiles * p_.token_tiles;
            write_partial(slot + place_.row_tile, factor, lse);
        }
    }

    __device__ void join_sums(float (&factor)[2], float (&lse)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sum_[i] += __shfl_xor_sync(~0u, sum_[i], 1);
            sum_[i] += __shfl_xor_sync(~0u, sum_[i], 2);
        }
        if (c_ == 0) {
            row_sum_[group_ * kRows + row(0)] = sum_[0];
            row_sum_[group_ * kRows + row(1)] = sum_[1];
        }
        sync_both();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float total = row_sum_[row(i)] + row_sum_[kRows + row(i)];
            factor[i] = total > 0.0f ? __fdividef(1.0f, total) : 0.0f;
            lse[i] = total > 0.0f ? max_[i] + ptx::log2_fast(total) : -INFINITY;
        }
        sync_both();  // before the next item's sums
    }

    __device__ void write_whole(const QuerySpan& query, const float (&factor)[2], const float (&lse)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const RowTarget<kRows> target(p_, place_, query, map_, row(i));
            if (!target.exists) continue;
            uint32_t* out = reinterpret_cast<uint32_t*>(target.out + group_ * kHalf + 2 * c_);
#pragma unroll
            for (int j = 0; j < 32; ++j)
                out[4 * j] = ptx::pack_bf16(out_[4 * j + 2 * i] * factor[i], out_[4 * j + 2 * i + 1] * factor[i]);
            if (group_ == 0 && c_ == 0) *target.lse = lse[i] * kLn2;
        }
    }

    __device__ float4 scaled(int j, const float (&factor)[2]) const {
        return make_float4(out_[4 * j] * factor[0], out_[4 * j + 1] * factor[0], out_[4 * j + 2] * factor[1],
                           out_[4 * j + 3] * factor[1]);
    }

    // In fragment order (merge.cuh), so that stores coalesce.
    __device__ void write_partial(int slot, const float (&factor)[2], const float (&lse)[2]) {
        using Store = Partial<kRows>;
        Store::Value* out = static_cast<Store::Value*>(p_.partial_out) + int64_t{slot} * FragmentIndex<kRows>::kTotal +
                            (warp_ * 2 + group_) * 512 + (threadIdx.x & 31);
        if (16 * warp_ >= p_.tile_heads * p_.tile_query_tokens) return;
#pragma unroll
        for (int j = 0; j < 16; ++j) out[j * 32] = Store::pack(scaled(2 * j, factor), scaled(2 * j + 1, factor));
        if (group_ == 0 && c_ == 0) {
            p_.partial_lse[int64_t{slot} * kRows + FragmentIndex<kRows>::state(row(0))] = lse[0];
            p_.partial_lse[int64_t{slot} * kRows + FragmentIndex<kRows>::state(row(1))] = lse[1];
        }
    }

    const DecodeParams& p_;
    const SharedMap<kRows>& shared_;
    const Place& place_;
    RowMap<kRows> map_;
    char* generic_;
    float *row_max_, *row_sum_;  // [row], [warpgroup][row]
    int group_, thread_, warp_, g_, c_;
    float scale_;  // softmax scale in base 2
    float out_[128];
    float max_[2], sum_[2];
    int seq_len_ = 0;
};

}  // namespace tokenspeed::mla
