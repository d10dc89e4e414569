// SPDX-License-Identifier: Apache-2.0
// The two products of a KV tile by one warpgroup of the swapped kernel (consumer.cuh), for bf16 and for e4m3 caches.
#pragma once

#include "producer.cuh"
#include "ptx_fp8.cuh"

namespace tokenspeed::mla {

template <int kRows>
class Products {
  public:
    using L = Layout<kRows>;
    static constexpr int kFragment = kRows / 2;  // accumulators per thread of a 64-row fragment
    static constexpr int kLatentBlocks = kLatent / 64;

    __device__ explicit Products(const SharedMap<kRows>& shared)
        : shared_(shared), thread_(threadIdx.x & 127), warp_(ptx::warp_number() & 3) {}

    __device__ void multiply_scores(float (&scores)[kFragment], int unit) const {
        const uint32_t query = shared_.query();
#pragma unroll
        for (int u = 0; u < kTileUnits; ++u) {
            ptx::barrier_wait(shared_.full(unit + u), shared_.phase(unit + u));
            ptx::mma_fence();
            const uint64_t keys = ptx::operand_descriptor(shared_.unit(unit + u));
            const uint64_t queries = ptx::operand_descriptor(query + u * kUnitBlocks * kRows * 128);
            if constexpr (kFp8) {
#pragma unroll
                for (int step = 0; step < kHeadDim / 32; ++step) {
                    const int block = step / 4, k = step % 4;
                    ptx::mma_fp8(scores, keys + block * (kBlockBytes >> 4) + 2 * k,
                                 queries + block * (kRows * 128 >> 4) + 2 * k, step != 0);
                }
            } else {
#pragma unroll
                for (int block = 0; block < kUnitBlocks; ++block) {
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        ptx::mma<0>(scores, keys + block * (kBlockBytes >> 4) + 2 * k,
                                    queries + block * (kRows * 128 >> 4) + 2 * k, (u | block | k) != 0);
                    }
                }
            }
        }
        ptx::mma_commit();
        ptx::mma_wait<0>();
        if constexpr (kFp8) ptx::mma_settle(scores);
    }

    // Rows past the end of the sequence may hold anything, NaN included, and 0 x NaN would reach O.
    __device__ void clear_values(int valid, int unit) const {
#pragma unroll 1
        for (int block = 0; block < kLatent / kBlockDims; ++block) {
            const uint32_t base = shared_.unit(unit + block / kUnitBlocks) + (block % kUnitBlocks) * kBlockBytes;
#pragma unroll 1
            for (int at = valid * 128 + thread_ * 16; at < kBlockBytes; at += 128 * 16) ptx::store_zeros(base + at);
        }
    }

    __device__ void multiply_values(float (&out)[kLatentBlocks][kFragment], int unit, int buffer) const {
        const uint64_t probs = ptx::operand_descriptor(shared_.probs(buffer));
        if constexpr (kFp8) {
            multiply_converted(out, unit, probs);
        } else {
            multiply_shared(out, unit, probs);
        }
    }

  private:
    // V^T lies in shared memory as the tensor core wants it.
    __device__ void multiply_shared(float (&out)[kLatentBlocks][kFragment], int unit, uint64_t probs) const {
        ptx::mma_fence();
#pragma unroll
        for (int m = 0; m < kLatentBlocks; ++m) {
            const uint64_t values =
                ptx::operand_descriptor(shared_.unit(unit + m / kUnitBlocks)) + (m % kUnitBlocks) * (kBlockBytes >> 4);
#pragma unroll
            for (int k = 0; k < 4; ++k) ptx::mma<1>(out[m], values + k * (2048 >> 4), probs + 2 * k, 1);
            if (m % kUnitBlocks == kUnitBlocks - 1 || m == kLatentBlocks - 1) ptx::mma_commit();
        }
        ptx::mma_wait<2>();
        release(unit);
        ptx::mma_wait<1>();
        release(unit + 1);
        ptx::mma_wait<0>();
        release(unit + 2);
    }

    // 8-bit operands must have their products' dimension contiguous, and V^T has not. So V^T goes through registers, as
    // fp16, which holds every e4m3 value: a transposing load brings pairs of dims of two tokens, and rows g and g + 8
    // of the operand are the two dims of a pair.
    __device__ void multiply_converted(float (&out)[kLatentBlocks][kFragment], int unit, uint64_t probs) const {
#pragma unroll
        for (int m = 0; m < kLatentBlocks; ++m) {
            uint32_t values[4][4];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t raw[4];
                ptx::load_transposed(value_address(unit, m, half), raw);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    ptx::unpack_pairs(raw[i], values[2 * half + i / 2][i % 2 * 2],
                                      values[2 * half + i / 2][i % 2 * 2 + 1]);
            }
            if (m == kLatentBlocks - 1) {
                __syncwarp();
                release(unit);
            }
            ptx::mma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k) ptx::mma_fp16(out[m], values[k], probs + 2 * k);
            ptx::mma_commit();
            if (m > 0) ptx::mma_wait<1>();
        }
        ptx::mma_wait<0>();
    }

    // Where this lane's row of 16 dims begins: token 32 half + lane, this warp's dims of a 64-dim block of V.
    __device__ uint32_t value_address(int unit, int m, int half) const {
        const int token = 32 * half + (threadIdx.x & 31), chunk = (m & 1) * 4 + warp_;
        return shared_.unit(unit) + m / 2 * kBlockBytes + token * kRowBytes + ((chunk ^ (token & 7)) << 4);
    }

    __device__ void release(int unit) const {
        if ((threadIdx.x & 31) == 0) ptx::barrier_arrive(shared_.empty(unit));
    }

    const SharedMap<kRows>& shared_;
    int thread_, warp_;
};

}  // namespace tokenspeed::mla
