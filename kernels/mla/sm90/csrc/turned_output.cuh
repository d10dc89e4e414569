// SPDX-License-Identifier: Apache-2.0
// The output of a row tile of 32 or 64 rows with an e4m3 cache (turned.cuh): a warpgroup's half of the latent dims of
// O^T, its products, and the way to where it belongs.
#pragma once

#include "merge.cuh"
#include "ptx_fp8.cuh"

namespace tokenspeed::mla {

// What the warpgroups tell each other of the rows, in shared memory.
template <int kRows>
struct TurnedStates {
    float* maxima;   // [row]
    float* sums;     // [warpgroup][row]
    float* factors;  // [tile % 4][row]: what a tile's new maxima do to O
    int4* raised;    // [tile % 4] of one word per warp: whether there are any

    __device__ explicit TurnedStates(char* generic)
        : maxima(reinterpret_cast<float*>(generic + Layout<kRows>::kReduceOffset)),
          sums(maxima + kRows),
          factors(sums + 2 * kRows),
          raised(reinterpret_cast<int4*>(factors + 4 * kRows)) {}
};

template <int kRows>
class TurnedOutput {
  public:
    __device__ TurnedOutput(const DecodeParams& p, const SharedMap<kRows>& shared, const Place& place, char* generic)
        : p_(p),
          shared_(shared),
          place_(place),
          map_(generic),
          states_(generic),
          group_(ptx::warp_number() / 4),
          thread_(threadIdx.x & 127),
          warp_(ptx::warp_number() & 3),
          g_((threadIdx.x & 31) / 4),
          c_(threadIdx.x & 3),
          scale_(*p.kv_scale) {}

    __device__ void clear() {
#pragma unroll
        for (int m = 0; m < kHalfBlocks; ++m)
#pragma unroll
            for (int i = 0; i < kRows / 2; ++i) out_[m][i] = 0.0f;
    }

    // Behind the wait for products in flight, before anything else touches their accumulators.
    __device__ void settle() {
#pragma unroll
        for (int m = 0; m < kHalfBlocks; ++m) ptx::mma_settle(out_[m]);
    }

    // O^T += V^T P^T for this warpgroup's half of the dims. An 8-bit operand must have the dimension that is summed
    // contiguous, and V^T has not: it goes through registers, as fp16, as in products.cuh. `finished`: a unit that
    // nothing but products in flight reads, or -1.
    template <bool kOwner>
    __device__ void multiply(int unit, int finished) {
        if (!kOwner) ptx::barrier_wait(shared_.full(unit, 1), shared_.phase(unit));
        scale(unit);
        const uint64_t probs = ptx::operand_descriptor(shared_probs(unit));
        uint32_t raw[2][2][4];
        load_values(raw[0], unit, 0);
#pragma unroll
        for (int m = 0; m < kHalfBlocks; ++m) {
            if (m + 1 < kHalfBlocks) load_values(raw[(m + 1) & 1], unit, m + 1);
            uint32_t values[4][4];
#pragma unroll
            for (int i = 0; i < 8; ++i)
                ptx::unpack_pairs(raw[m & 1][i / 4][i % 4], values[i / 2][i % 2 * 2], values[i / 2][i % 2 * 2 + 1]);
            if (kOwner && m == kHalfBlocks - 1) {
                __syncwarp();
                release(unit, 0);
            }
            ptx::mma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k) ptx::mma_fp16(out_[m], values[k], probs + 2 * k);
            ptx::mma_commit();
            ptx::mma_wait<1>();
            if (m == 0 && finished >= 0) release_late(finished);
        }
    }

    __device__ void release(int unit, int part) const {
        if ((threadIdx.x & 31) == 0) ptx::barrier_arrive(shared_.empty(unit, part));
    }
    __device__ void release_late(int unit) const { release(unit, 1); }

    // P of a tile lies where its rope rows were.
    __device__ uint32_t shared_probs(int unit) const { return shared_.unit(unit) + (kDimBlocks - 1) * kBlockBytes; }

    __device__ void write_whole(const QuerySpan& query) {
#pragma unroll
        for (int i = 0; i < kRows / 4; ++i) {
            const RowTarget<kRows> target(p_, place_, query, map_, column(i));
            if (!target.exists) continue;
            const RowState s = state(column(i));
            uint32_t* out = reinterpret_cast<uint32_t*>(target.out + group_ * (kLatent / 2) + warp_ * 16 + 2 * g_);
            const int low = 4 * (i / 2) + (i & 1);
#pragma unroll
            for (int m = 0; m < kHalfBlocks; ++m)
                out[m * 32] = ptx::pack_bf16(out_[m][low] * s.factor, out_[m][low + 2] * s.factor);
            if (writes_lse()) *target.lse = s.lse * kLn2;
        }
    }

    // In fragment order (merge.cuh), so that stores coalesce.
    __device__ void write_partial(int slot) {
        using Store = Partial<kRows>;
        auto* out = static_cast<typename Store::Value*>(p_.partial_out) + int64_t{slot} * FragmentIndex<kRows>::kTotal +
                    group_ * (FragmentIndex<kRows>::kTotal / 2) + thread_;
#pragma unroll
        for (int j = 0; j < kRows / 8; ++j) {
            const RowState low = state(column(2 * j)), high = state(column(2 * j + 1));
#pragma unroll
            for (int m = 0; m < kHalfBlocks; m += 2) {
                out[(m / 2 * (kRows / 8) + j) * 128] =
                    Store::pack(scaled(m, j, low.factor, high.factor), scaled(m + 1, j, low.factor, high.factor));
            }
            if (writes_lse()) {
                p_.partial_lse[int64_t{slot} * kRows + column(2 * j)] = low.lse;
                p_.partial_lse[int64_t{slot} * kRows + column(2 * j + 1)] = high.lse;
            }
        }
    }

  private:
    static constexpr int kHalfBlocks = kLatent / 2 / 64;  // of 64 dims

    struct RowState {
        float factor, lse;
    };

    __device__ RowState state(int at) const {
        const float total = states_.sums[at] + states_.sums[kRows + at];
        return {total > 0.0f ? __fdividef(scale_, total) : 0.0f,
                total > 0.0f ? states_.maxima[at] + ptx::log2_fast(total) : -INFINITY};
    }

    __device__ bool writes_lse() const { return thread_ < 4 && group_ == 0; }

    // Query row of the i-th column of this thread.
    __device__ int column(int i) const { return 8 * (i / 2) + 2 * c_ + (i & 1); }

    // Where the tile raised maxima, what has been summed up to now shrinks.
    __device__ void scale(int unit) {
        const int4 raised = states_.raised[unit & 3];
        if ((raised.x | raised.y | raised.z | raised.w) == 0) return;
        ptx::mma_wait<0>();
        const float2* factors = reinterpret_cast<const float2*>(states_.factors + (unit & 3) * kRows) + c_;
#pragma unroll
        for (int j = 0; j < kRows / 8; ++j) {
            const float2 factor = factors[4 * j];
#pragma unroll
            for (int m = 0; m < kHalfBlocks; ++m) {
                out_[m][4 * j] *= factor.x;
                out_[m][4 * j + 1] *= factor.y;
                out_[m][4 * j + 2] *= factor.x;
                out_[m][4 * j + 3] *= factor.y;
            }
        }
    }

    // Pairs of this warp's 16 dims of 64, of all tokens: lane l brings the rows of tokens l and 32 + l.
    __device__ void load_values(uint32_t (&raw)[2][4], int unit, int m) const {
        const int lane = threadIdx.x & 31, chunk = (m & 1) * 4 + warp_;
        const uint32_t address =
            shared_.unit(unit) + (2 * group_ + m / 2) * kBlockBytes + lane * kRowBytes + ((chunk ^ (lane & 7)) << 4);
        ptx::load_transposed(address, raw[0]);
        ptx::load_transposed(address + 32 * kRowBytes, raw[1]);
    }

    // Two dims of the low row, then of the high one.
    __device__ float4 scaled(int m, int j, float low, float high) const {
        return make_float4(out_[m][4 * j] * low, out_[m][4 * j + 2] * low, out_[m][4 * j + 1] * high,
                           out_[m][4 * j + 3] * high);
    }

    const DecodeParams& p_;
    const SharedMap<kRows>& shared_;
    const Place& place_;
    RowMap<kRows> map_;
    TurnedStates<kRows> states_;
    int group_, thread_, warp_, g_, c_;
    float scale_;  // of the latents
    float out_[kHalfBlocks][kRows / 2];
};

}  // namespace tokenspeed::mla
