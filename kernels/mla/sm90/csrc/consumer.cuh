// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup of the swapped kernel: KV tokens (then latent dims) lie on the M side of the tensor-core
// instruction and query rows on its N side, so that 16 rows cost 16 columns and not a padded 64.
//
//   S^T[64 tokens x rows]  = K[64 x 576]    Q^T[576 x rows]       K, Q from shared memory
//   O^T[512 dims x rows]  += V^T[512 x 64]  P^T[64 x rows]        V is the same shared memory as K
//
// Thread (warp w, lane 4g + c) of the warpgroup holds tokens (dims) 16w + g and 16w + g + 8 of each 64-row fragment
// and columns 8j + 2c, 8j + 2c + 1.
#pragma once

#include "merge.cuh"
#include "products.cuh"

namespace tokenspeed::mla {

template <int kRows>
class Consumer {
  public:
    using L = Layout<kRows>;
    static constexpr int kColumns = kRows / 4;   // columns per thread
    static constexpr int kFragment = kRows / 2;  // accumulators per thread of a 64-row fragment
    static constexpr int kLatentBlocks = Products<kRows>::kLatentBlocks;
    static constexpr float kRescaleLog2 = 8.0f;  // the maximum may lag by 2^8 before O is rescaled

    __device__ Consumer(const DecodeParams& p, const SharedMap<kRows>& shared, const Place& place, char* generic)
        : p_(p),
          shared_(shared),
          products_(shared),
          place_(place),
          map_(generic),
          generic_(generic),
          reduce_(reinterpret_cast<float4*>(generic + L::kReduceOffset)),
          state_(reinterpret_cast<float*>(generic + L::kStateOffset)),
          group_(ptx::warp_number() / 4),
          thread_(threadIdx.x & 127),
          warp_(ptx::warp_number() & 3),
          g_((threadIdx.x & 31) / 4),
          c_(threadIdx.x & 3),
          scale_(p.softmax_scale * 1.4426950408889634f * (kFp8 ? *p.query_scale * *p.kv_scale : 1.0f)),
          out_scale_(kFp8 ? *p.kv_scale : 1.0f) {}

    __device__ void run(Span span) {
        SharedRequest head, tail;  // requests that this block shares with later and with earlier groups
        int unit = 0, item = 0;
        for (bool more = span.begin(); more; more = span.next(p_), ++item) {
            seq_len_ = span.seq_len;
            const QuerySpan query(p_, place_, span.request);
            SharedRequest shared;
            if (!span.whole) shared.open(p_, place_, span.request);
            clear();
            ptx::barrier_wait(shared_.query_full(), item & 1);
#pragma unroll 1
            for (int t = group_; t < span.num_tiles; t += 2) {
                tile(query, (span.first_tile + t) * kTileTokens, unit + t * kTileUnits);
            }
            if (group_ == 1 && (span.num_tiles & 1)) skip_tile();
            unit += span.num_tiles * kTileUnits;
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
    __device__ void clear() {
#pragma unroll
        for (int m = 0; m < kLatentBlocks; ++m)
#pragma unroll
            for (int i = 0; i < kFragment; ++i) out_[m][i] = 0.0f;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            max_[i] = -INFINITY;
            sum_[i] = 0.0f;
        }
        empty_ = true;
    }

    __device__ int column(int i) const { return 8 * (i / 2) + 2 * c_ + (i & 1); }
    __device__ void sync_group() { group_ == 0 ? ptx::named_sync(1, 128) : ptx::named_sync(2, 128); }
    __device__ void sync_both() { ptx::named_sync(3, kConsumerThreads); }
    __device__ void skip_tile() { sync_group(), sync_group(); }  // for racecheck: as many barriers as the other one

    __device__ void tile(const QuerySpan& query, int first_token, int unit) {
        float scores[kFragment];
        products_.multiply_scores(scores, unit);
        if (first_token + kTileTokens > seq_len_ - query.query_tokens + 1) mask(scores, query, first_token);
        const int buffer = parity_;
        parity_ ^= 1;
        publish_maximum(scores, buffer);
        float sums[kColumns];
        if (!empty_) store_probabilities(scores, sums, buffer);
        if (first_token + kTileTokens > seq_len_) products_.clear_values(seq_len_ - first_token, unit);
        ptx::fence_async();
        sync_group();
        if (raise_maximum(buffer)) {
            store_probabilities(scores, sums, buffer);
            ptx::fence_async();
        }
        sync_group();
#pragma unroll
        for (int i = 0; i < kColumns; ++i) sum_[i] += sums[i];
        products_.multiply_values(out_, unit, group_ * 2 + buffer);
    }

    // Row r of the tile sees the request's tokens up to its own.
    __device__ void mask(float (&scores)[kFragment], const QuerySpan& query, int first_token) {
        const int token = first_token + warp_ * 16 + g_;
        const int last = seq_len_ - (query.query_tokens - 1 - place_.token_in_request);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            const int visible = last + map_.token(column(i));
            const int low = 4 * (i / 2) + (i & 1);
            if (token >= visible) scores[low] = -INFINITY;
            if (token + 8 >= visible) scores[low + 2] = -INFINITY;
        }
    }

    __device__ void publish_maximum(const float (&scores)[kFragment], int buffer) {
        float* reduce = reinterpret_cast<float*>(reduce_ + (buffer * 2 + group_) * kRows);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            const int low = 4 * (i / 2) + (i & 1);
            float value = fmaxf(scores[low], scores[low + 2]);
            value = fmaxf(value, __shfl_xor_sync(~0u, value, 4));
            value = fmaxf(value, __shfl_xor_sync(~0u, value, 8));
            value = fmaxf(value, __shfl_xor_sync(~0u, value, 16));
            if (g_ == 0) reduce[column(i) * 4 + warp_] = value;
        }
    }

    // Adopts the published maxima where the one in use lags too far; the same in all threads of the warpgroup.
    __device__ bool raise_maximum(int buffer) {
        float fresh[kColumns];
        bool raise = false;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            const float4 v = reduce_[(buffer * 2 + group_) * kRows + column(i)];
            fresh[i] = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)) * scale_;
            // Rows past the tile hold leftovers of shared memory; they must not steer the others.
            raise |= map_.token(column(i)) != kNoRow && fresh[i] > max_[i] + kRescaleLog2;
        }
        if (!__any_sync(~0u, raise || empty_)) return false;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            const float next = fmaxf(max_[i], fresh[i]);
            const float factor = next == -INFINITY ? 1.0f : ptx::exp2_fast(max_[i] - next);
            max_[i] = next;
            sum_[i] *= factor;
            const int low = 4 * (i / 2) + (i & 1);
#pragma unroll
            for (int m = 0; m < kLatentBlocks; ++m) {
                out_[m][low] *= factor;
                out_[m][low + 2] *= factor;
            }
        }
        empty_ = false;
        return true;
    }

    __device__ static uint32_t pack(float low, float high) {
        return kFp8 ? ptx::pack_fp16(low, high) : ptx::pack_bf16(low, high);
    }

    // P^T as a K-major operand: row = query row, 64 tokens of 2 bytes, 128-byte swizzle.
    __device__ void store_probabilities(const float (&scores)[kFragment], float (&sums)[kColumns], int buffer) {
        uint32_t packed[kFragment / 2];
#pragma unroll
        for (int j = 0; j < kFragment / 4; ++j) {
            float value[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float limit = max_[2 * j + (i & 1)];
                value[i] = ptx::exp2_fast(fmaf(scores[4 * j + i], scale_, limit == -INFINITY ? 0.0f : -limit));
            }
            sums[2 * j] = value[0] + value[2];
            sums[2 * j + 1] = value[1] + value[3];
            packed[2 * j] = pack(value[0], value[1]);
            packed[2 * j + 1] = pack(value[2], value[3]);
        }
        const int lane = threadIdx.x & 31, r = lane & 7, matrix = lane >> 3;
        const int chunk = warp_ * 2 + (matrix & 1);
        const uint32_t address =
            shared_.probs(group_ * 2 + buffer) + ((matrix >> 1) * 8 + r) * 128 + ((chunk ^ r) << 4);
#pragma unroll
        for (int j = 0; j < kFragment / 8; ++j) {
            ptx::store_transposed(address + j * 16 * 128, packed[4 * j], packed[4 * j + 1], packed[4 * j + 2],
                                  packed[4 * j + 3]);
        }
    }

    // Joins the warpgroups' halves, normalizes and writes O and LSE, whole or as a partial of the merge.
    __device__ void finish(const Span& span, const QuerySpan& query) {
        float lse[kColumns], factor[kColumns];
        join_sums(lse, factor);
        // Barriers stand in code that both warpgroups run: the checkers of compute-sanitizer know them by address.
        if (group_ == 1) lend_half(factor);
        sync_both();
        if (group_ == 0) swap_halves(factor);
        sync_both();
        if (group_ == 1) take_half(factor);
        if (span.left > span.num_tiles) ptx::fence_async();  // the next query lands where the halves were
        __syncwarp();                                        // every lane has read what the others lent
        if ((threadIdx.x & 31) == 0) ptx::barrier_arrive(shared_.query_empty());
        if (group_ == 0) {
            write_half<0>(span, query, lse);
        } else {
            write_half<kLatentBlocks / 2>(span, query, lse);
        }
    }

    template <int kMine>
    __device__ void write_half(const Span& span, const QuerySpan& query, const float (&lse)[kColumns]) {
        if (span.whole) {
            write_whole<kMine>(query, lse);
        } else {
            const int slot = (2 * place_.group + (span.first_tile == 0 ? 1 : 0)) * p_.head_tiles * p_.token_tiles;
            write_partial<kMine>(slot + place_.row_tile, lse);
        }
    }

    // Row sums and the joint maximum; `factor` makes the warpgroups' O add up to the normalized output.
    __device__ void join_sums(float (&lse)[kColumns], float (&factor)[kColumns]) {
        float* reduce = reinterpret_cast<float*>(reduce_ + group_ * kRows);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
#pragma unroll
            for (int i = 0; i < kColumns; ++i) sum_[i] += __shfl_xor_sync(~0u, sum_[i], step);
        }
        sync_both();
        if (g_ == 0) {
#pragma unroll
            for (int i = 0; i < kColumns; ++i) {
                reduce[column(i) * 4 + warp_] = sum_[i];
                if (warp_ == 0) state_[group_ * kRows + column(i)] = max_[i];
            }
        }
        sync_both();
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            const float4 own = reduce_[group_ * kRows + column(i)], other = reduce_[(1 - group_) * kRows + column(i)];
            const float other_max = state_[(1 - group_) * kRows + column(i)];
            const float top = fmaxf(max_[i], other_max), base = top == -INFINITY ? 0.0f : top;
            const float own_scale = ptx::exp2_fast(max_[i] - base);
            const float total = (own.x + own.y + own.z + own.w) * own_scale +
                                (other.x + other.y + other.z + other.w) * ptx::exp2_fast(other_max - base);
            lse[i] = total > 0.0f ? top + ptx::log2_fast(total) : -INFINITY;
            factor[i] = total > 0.0f ? __fdividef(own_scale, total) * out_scale_ : 0.0f;
        }
    }

    __device__ float4 scaled(int m, int j, const float (&factor)[kColumns]) const {
        return make_float4(out_[m][4 * j] * factor[2 * j], out_[m][4 * j + 1] * factor[2 * j + 1],
                           out_[m][4 * j + 2] * factor[2 * j], out_[m][4 * j + 3] * factor[2 * j + 1]);
    }

    __device__ void take(int m, int j, const float (&factor)[kColumns], const float4& other) {
        const float4 own = scaled(m, j, factor);
        out_[m][4 * j] = own.x + other.x;
        out_[m][4 * j + 1] = own.y + other.y;
        out_[m][4 * j + 2] = own.z + other.z;
        out_[m][4 * j + 3] = own.w + other.w;
    }

    // Warpgroup 0 ends with the sums of the lower latent half, warpgroup 1 with those of the upper half. The halves
    // meet in the query rows' memory, free once all scores of an item are done. A thread of warpgroup 0 puts its half
    // of the other's blocks where it has just taken what it needed.
    static constexpr int kHalfBlocks = kLatentBlocks / 2, kPieces = kFragment / 4;

    __device__ float4* box() const { return reinterpret_cast<float4*>(generic_ + L::kQueryOffset) + thread_; }

    __device__ void lend_half(const float (&factor)[kColumns]) {
#pragma unroll
        for (int i = 0; i < kHalfBlocks * kPieces; ++i) box()[i * 128] = scaled(i / kPieces, i % kPieces, factor);
    }

    __device__ void swap_halves(const float (&factor)[kColumns]) {
#pragma unroll
        for (int i = 0; i < kHalfBlocks * kPieces; ++i) {
            const float4 other = box()[i * 128];
            box()[i * 128] = scaled(kHalfBlocks + i / kPieces, i % kPieces, factor);
            take(i / kPieces, i % kPieces, factor, other);
        }
    }

    __device__ void take_half(const float (&factor)[kColumns]) {
#pragma unroll
        for (int i = 0; i < kHalfBlocks * kPieces; ++i)
            take(kHalfBlocks + i / kPieces, i % kPieces, factor, box()[i * 128]);
    }

    template <int kMine>
    __device__ void write_whole(const QuerySpan& query, const float (&lse)[kColumns]) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            const RowTarget<kRows> target(p_, place_, query, map_, column(i));
            if (!target.exists) continue;
            __nv_bfloat16* out = target.out + warp_ * 16 + g_ * (kFp8 ? 2 : 1);
            const int low = 4 * (i / 2) + (i & 1);
#pragma unroll
            for (int m = kMine; m < kMine + kLatentBlocks / 2; ++m) {
                out[m * 64] = __float2bfloat16(out_[m][low]);
                out[m * 64 + FragmentIndex<kRows>::kDimStep] = __float2bfloat16(out_[m][low + 2]);
            }
            if (kMine == 0 && g_ == 0 && warp_ == 0) *target.lse = lse[i] * kLn2;
        }
    }

    // In fragment order (merge.cuh), so that stores coalesce.
    template <int kMine>
    __device__ void write_partial(int slot, const float (&lse)[kColumns]) {
        using Store = Partial<kRows>;
        auto* out = static_cast<typename Store::Value*>(p_.partial_out) + int64_t{slot} * FragmentIndex<kRows>::kTotal +
                    thread_;
#pragma unroll
        for (int i = 0; i < kLatentBlocks / 2 * kPieces; ++i) {
            const int m = kMine + i / kPieces, j = i % kPieces;
            out[(kMine * kPieces + i) * 128] =
                Store::pack(make_float4(out_[m][4 * j], out_[m][4 * j + 2], out_[m][4 * j + 1], out_[m][4 * j + 3]));
        }
        if (kMine == 0 && g_ == 0 && warp_ == 0) {
#pragma unroll
            for (int i = 0; i < kColumns; ++i) p_.partial_lse[int64_t{slot} * kRows + column(i)] = lse[i];
        }
    }

    const DecodeParams& p_;
    const SharedMap<kRows>& shared_;
    Products<kRows> products_;
    const Place& place_;
    RowMap<kRows> map_;
    char* generic_;
    float4* reduce_;  // [buffer][warpgroup][row] of one value per warp
    float* state_;    // [warpgroup][row]
    int group_, thread_, warp_, g_, c_;
    float scale_;  // softmax scale in base 2
    float out_scale_;
    float out_[kLatentBlocks][kFragment];
    float max_[kColumns], sum_[kColumns];
    int seq_len_ = 0, parity_ = 0;
    bool empty_ = true;
};

}  // namespace tokenspeed::mla
