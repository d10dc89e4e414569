// SPDX-License-Identifier: Apache-2.0
// Product of a few rows with a weight matrix: Y[rows, out] = X[rows, in] W[out, in]^T, fp32 sums, rounded once.
//
// With up to 16 rows nothing but reading W takes time, so all that matters is that the memory is never idle:
//
// * A block has 16 rows of W; its warps share the dimension that is summed, line by line, so that together they read
//   neighbouring memory. No byte of W is read twice, and nothing is staged: operands of the tensor cores come straight
//   from memory into registers. A thread's 16 bytes are 8 neighbouring values of a row, where the instruction wants
//   pairs that are 8 apart; W and X take the same permutation of the summed dimension, and a sum does not know its
//   order.
// * Every warp has kAhead lines of each of its rows under way; with two blocks on a multiprocessor that is 64 KiB,
// where
//   bandwidth times latency is 22.
// * Weights do not depend on the kernel before. With a dependent launch the first lines are asked for before
//   griddepcontrol.wait: they come while the kernel before ends, or while it waits for other ranks. All that is read
//   behind the wait (X) and written (Y) is ordered by it. Every block waits, so the end of this grid implies the end of
//   those before it, which the exchange of kernels/comm relies on.
// * The kernel lets the next one start early; that waits as well before it touches anything.
//
// A row's sum has an order of its own that does not depend on the rows around it.
#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

#include "params.cuh"

namespace tokenspeed::linear {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kTileOut = 16;                  // rows of W that an instruction takes, and that a block has
constexpr int kTileRows = 8;                  // rows of X that an instruction takes
constexpr int kHalves = 2;                    // of a line, each of which four threads read by 16 bytes
constexpr int kHalfValues = 32;               //
constexpr int kLine = kHalves * kHalfValues;  // values of a row in 128 bytes
constexpr int kStep = kWarps * kLine;         // values of a row that a block takes at once
constexpr int kLaneValues = 8;                // values in 16 bytes
constexpr int kAhead = 2;
constexpr int kPitch = kTileOut + 1;  // of partial sums: no two rows in one bank

// Weights are read once, and should drive nothing out of the L1 that is read again.
__device__ __forceinline__ uint4 load_weight(const __nv_bfloat16* address) {
    uint4 bits;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(address));
    return bits;
}

// Written by the kernel before, so no read-only load; asked for where it stands.
__device__ __forceinline__ uint4 load_row(const __nv_bfloat16* address) {
    uint4 bits;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(address)
                 : "memory");
    return bits;
}

__device__ __forceinline__ void multiply(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// A thread's part of a line of the block's rows of W: rows `lane / 4` and 8 below, of each half 8 values from
// `lane % 4 * 8`.
struct WeightLine {
    uint4 above[kHalves], below[kHalves];

    __device__ __forceinline__ void load(const __nv_bfloat16* row, int64_t stride) {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
            above[half] = load_weight(row + half * kHalfValues);
            below[half] = load_weight(row + half * kHalfValues + kTileRows * stride);
        }
    }
};

// The same of X: row `lane / 4` of each tile of 8. Rows past the last one are zero.
template <int kTiles>
struct RowLine {
    uint4 bits[kTiles][kHalves];

    __device__ __forceinline__ void load(const __nv_bfloat16* row, int64_t stride, int num_rows) {
        const int first = static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
                bits[tile][half] = make_uint4(0, 0, 0, 0);
                if (tile * kTileRows + first < num_rows) {
                    bits[tile][half] = load_row(row + tile * kTileRows * stride + half * kHalfValues);
                }
            }
        }
    }
};

template <int kTiles>
__device__ __forceinline__ void accumulate(float (&sums)[kTiles][4], const WeightLine& w, const RowLine<kTiles>& x) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
        const uint4 &a = w.above[half], &below = w.below[half];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const uint4& b = x.bits[tile][half];
            multiply(sums[tile], a.x, below.x, a.y, below.y, b.x, b.y);
            multiply(sums[tile], a.z, below.z, a.w, below.w, b.z, b.w);
        }
    }
}

// kTiles: tiles of 8 rows of X.
template <int kTiles>
__global__ void __launch_bounds__(kThreads, 2) few_rows_kernel(const __grid_constant__ Params p) {
    __shared__ float parts[kWarps][kTiles * kTileRows][kPitch];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_out = blockIdx.x * kTileOut, begin = warp * kLine, lane_offset = lane % 4 * kLaneValues;
    const auto* weight =
        static_cast<const __nv_bfloat16*>(p.weight) + (first_out + lane / 4) * p.weight_stride + lane_offset;
    const auto* rows = static_cast<const __nv_bfloat16*>(p.rows_in) + lane / 4 * p.row_stride + lane_offset;

    WeightLine w[kAhead];
    RowLine<kTiles> x[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
        if (begin + i * kStep < p.in_values) w[i].load(weight + begin + i * kStep, p.weight_stride);
    }
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
        if (begin + i * kStep < p.in_values) x[i].load(rows + begin + i * kStep, p.row_stride, p.num_rows);
    }

    float sums[kTiles][4] = {};
    for (int at = begin; at < p.in_values; at += kAhead * kStep) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (at + i * kStep < p.in_values) accumulate(sums, w[i], x[i]);
            const int next = at + (kAhead + i) * kStep;
            if (next < p.in_values) {
                w[i].load(weight + next, p.weight_stride);
                x[i].load(rows + next, p.row_stride, p.num_rows);
            }
        }
    }

#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {  // a thread has two rows of X by two rows of W
        float* place = &parts[warp][tile * kTileRows + lane % 4 * 2][lane / 4];
        place[0] = sums[tile][0];
        place[kPitch] = sums[tile][1];
        place[kTileRows] = sums[tile][2];
        place[kPitch + kTileRows] = sums[tile][3];
    }
    __syncthreads();
    const auto* bias = static_cast<const __nv_bfloat16*>(p.bias);
    auto* result = static_cast<__nv_bfloat16*>(p.rows_out);
    for (int index = threadIdx.x; index < kTileOut * p.num_rows; index += kThreads) {
        const int row = index / kTileOut, out = index % kTileOut;
        float sum = 0.0f;
#pragma unroll
        for (int part = 0; part < kWarps; ++part) sum += parts[part][row][out];
        if (bias != nullptr) sum += __bfloat162float(bias[first_out + out]);
        result[static_cast<int64_t>(row) * p.out_values + first_out + out] = __float2bfloat16(sum);
    }
}

}  // namespace tokenspeed::linear
