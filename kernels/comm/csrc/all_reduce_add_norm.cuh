// SPDX-License-Identifier: Apache-2.0
// Sum over all ranks, residual add and RMS norm of a row, in one launch: one block for each row.
//
// The sum is taken in fp32 in the order of the ranks, so it is bitwise the same on all of them, and rounded to the type
// of the elements once, as the result of an all-reduce is. Residual plus sum stays in fp32 for the norm and is rounded
// where it is stored. The normalised value is rounded once, at the end.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "exchange.cuh"
#include "params.cuh"

namespace tokenspeed::comm {

template <typename Element>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
    static __device__ __forceinline__ float2 unpack(uint32_t bits) {
        return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
    }
    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const uint32_t*>(&pair);
    }
};

template <>
struct Pair<__half> {
    static __device__ __forceinline__ float2 unpack(uint32_t bits) {
        return __half22float2(*reinterpret_cast<const __half2*>(&bits));
    }
    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        const __half2 pair = __floats2half2_rn(low, high);
        return *reinterpret_cast<const uint32_t*>(&pair);
    }
};

// Eight values of a row, as one thread has them.
struct Lane {
    float value[kLaneElements];

    template <typename Element>
    static __device__ __forceinline__ Lane unpack(const uint4& bits) {
        const float2 a = Pair<Element>::unpack(bits.x), b = Pair<Element>::unpack(bits.y);
        const float2 c = Pair<Element>::unpack(bits.z), d = Pair<Element>::unpack(bits.w);
        return {{a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y}};
    }

    template <typename Element>
    __device__ __forceinline__ uint4 pack() const {
        return make_uint4(Pair<Element>::pack(value[0], value[1]), Pair<Element>::pack(value[2], value[3]),
                          Pair<Element>::pack(value[4], value[5]), Pair<Element>::pack(value[6], value[7]));
    }

    __device__ __forceinline__ void add(const Lane& other) {
#pragma unroll
        for (int i = 0; i < kLaneElements; ++i) value[i] += other.value[i];
    }

    __device__ __forceinline__ float sum_of_squares() const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kLaneElements; ++i) sum += value[i] * value[i];
        return sum;
    }
};

// Asked for where it stands and not where it is used: it is to be under way while peers are waited for.
__device__ __forceinline__ uint4 load_lane(const void* base, int64_t lane) {
    const uint4* address = static_cast<const uint4*>(base) + lane;
    uint4 bits;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(address));
    return bits;
}

__device__ __forceinline__ void store_lane(void* base, int64_t lane, const uint4& bits) {
    static_cast<uint4*>(base)[lane] = bits;
}

// Sum over the block, in a fixed order; every thread gets it. `partial`: a value for each warp. Has a barrier between
// reading a row's last slot and writing it.
__device__ __forceinline__ float block_sum(float value, float* partial) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0.0f;
    for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) sum += partial[warp];
    return sum;
}

// Factors of a lane; `weight` is null, of the elements' type or fp32.
template <typename Element>
__device__ __forceinline__ Lane factors(const Params& params, int lane, const uint4& bits) {
    Lane weight;
    if (params.weight == nullptr) {
#pragma unroll
        for (int i = 0; i < kLaneElements; ++i) weight.value[i] = 1.0f;
        return weight;
    }
    if (params.weight_type == ElementType::kFloat32) {
        const float4* source = static_cast<const float4*>(params.weight) + 2 * lane;
        const float4 low = source[0], high = source[1];
        weight = {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
    } else {
        weight = Lane::unpack<Element>(bits);
    }
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) weight.value[i] += params.weight_offset;
    return weight;
}

// Stores residual plus sum, and its norm; `squares`: their sum over the row.
template <typename Element, int kLanes>
__device__ __forceinline__ void store_row(const Params& params, int64_t row, const Lane (&total)[kLanes],
                                          const uint4 (&weight)[kLanes], float squares) {
    const int lanes = params.hidden / kLaneElements;
    const float scale = rsqrtf(squares / static_cast<float>(params.hidden) + params.epsilon);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
        const int lane = threadIdx.x + i * blockDim.x;
        if (lane >= lanes) continue;
        store_lane(params.total, row * lanes + lane, total[i].template pack<Element>());
        const Lane factor = factors<Element>(params, lane, weight[i]);
        Lane normed = total[i];
#pragma unroll
        for (int k = 0; k < kLaneElements; ++k) normed.value[k] = normed.value[k] * scale * factor.value[k];
        store_lane(params.normed, row * lanes + lane, normed.pack<Element>());
    }
}

// The sum of all ranks' values, rounded to the type of the elements.
template <typename Element, int kRanks, int kLanes>
__device__ __forceinline__ uint4 sum_over_ranks(const RowExchange<kRanks>& exchange, int lane, const uint4& own) {
    constexpr int kAtOnce = kLanes > 2        ? 2
                            : kRanks < 4      ? kRanks
                            : kRanks % 4 == 0 ? 4
                                              : 2;  // as many as registers allow
    Lane sum;
#pragma unroll
    for (int first = 0; first < kRanks; first += kAtOnce) {
        uint4 terms[kAtOnce];
        exchange.template receive<kAtOnce>(lane, first, own, terms);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const Lane term = Lane::unpack<Element>(terms[i]);
            if (first + i == 0) {
                sum = term;
            } else {
                sum.add(term);
            }
        }
    }
    return sum.pack<Element>();
}

// Asks for a line of memory to be brought into the L2. A hint: nothing is read, so it may come before what writes
// there.
__device__ __forceinline__ void fetch_line(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Lines of a row that its block is going to read and that are likely not in the L2.
__device__ __forceinline__ void fetch_lines(const Params& params, int64_t row, int lanes) {
    constexpr int kLineLanes = 128 / kLaneBytes;
    if (threadIdx.x == 0) fetch_line(params.last_slots + row);
    for (int lane = threadIdx.x * kLineLanes; lane < lanes; lane += blockDim.x * kLineLanes) {
        if (params.weight != nullptr) fetch_line(static_cast<const uint4*>(params.weight) + lane);
        if (params.residual != nullptr) {
            const uint4* residual = static_cast<const uint4*>(params.residual);
            fetch_line(residual + row * (params.residual_stride / kLaneElements) + lane);
        }
        if (params.rows > kFewRows) continue;
        const int places = num_places(params.num_ranks);
        for (int place = 0; place < kSlots * places; ++place) {  // [slot][place]
            if (places > 1 && place % places == params.rank) continue;
            const int64_t offset = (place * static_cast<int64_t>(params.max_rows) + row) * row_bytes(params.hidden);
            fetch_line(static_cast<const char*>(params.staging[params.rank]) + offset + lane * kLaneBytes);
        }
    }
}

// Where a row of this call lies in the staging memory.
__device__ __forceinline__ uint32_t next_slot(const Params& params, int64_t row) {
    const uint32_t slot = *static_cast<const volatile uint32_t*>(params.last_slots + row) + 1;  // blank + 1 is 0
    return slot == kSlots ? 0 : slot;
}

// kLanes: 16-byte accesses of a thread. The block has a multiple of 32 threads, at least lanes / kLanes of them.
//
// With kDependentLaunch blocks start when those of the previous kernel have left or said that it may be followed, and
// not when it has drained. What comes before griddepcontrol.wait therefore reads and writes no value: it only asks for
// lines that were written long ago, which the weights of the products since then have driven out of the L2. All that is
// read, the slot of the last call first, and all that is written, here and in the peers' memory, comes behind the wait,
// which returns when every earlier kernel has ended and what it wrote is visible. So a launch that starts early does
// nothing before the previous launch has ended, as exchange.cuh wants it. The next kernel may start early, too, once
// all blocks of this one run: the product of a few rows (kernels/linear) then reads its weights while ranks wait for
// each other. A kernel that was not launched to do so starts when this one has ended.
template <typename Element, int kRanks, int kLanes>
__global__ void __launch_bounds__(kMaxThreads) all_reduce_add_norm_kernel(const __grid_constant__ Params params) {
    const int64_t row = blockIdx.x;
    const int lanes = params.hidden / kLaneElements;
    if constexpr (kRanks > 1) fetch_lines(params, row, lanes);
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");  // everything below may be written by the previous kernel
    const bool has_residual = params.residual != nullptr;
    const bool has_packed_weight = params.weight != nullptr && params.weight_type != ElementType::kFloat32;
    uint32_t slot = 0;
    if constexpr (kRanks > 1) slot = next_slot(params, row);

    uint4 branch[kLanes], other[kLanes], residual[kLanes], weight[kLanes];
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
        const int lane = threadIdx.x + i * blockDim.x;
        branch[i] = residual[i] = weight[i] = make_uint4(0, 0, 0, 0);
        if (lane < lanes) branch[i] = load_lane(params.branch, row * (params.branch_stride / kLaneElements) + lane);
    }
    const RowExchange<kRanks> exchange(params, static_cast<int>(row), slot);
    if constexpr (kRanks > 1) {
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
            const int lane = threadIdx.x + i * blockDim.x;
            if (lane < lanes) exchange.send(lane, branch[i]);
        }
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
            const int lane = threadIdx.x + i * blockDim.x;
            if (lane < lanes) exchange.make_blank(lane);
        }
    }
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
        const int lane = threadIdx.x + i * blockDim.x;
        if (lane >= lanes) continue;
        if (has_residual) {
            residual[i] = load_lane(params.residual, row * (params.residual_stride / kLaneElements) + lane);
        }
        if (has_packed_weight) weight[i] = load_lane(params.weight, lane);
        if constexpr (kRanks == 1) {
            if (params.other != nullptr) other[i] = load_lane(params.other, row * lanes + lane);
        }
    }

    Lane total[kLanes];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
        const int lane = threadIdx.x + i * blockDim.x;
        if (lane >= lanes) continue;
        if constexpr (kRanks > 1) {
            branch[i] = sum_over_ranks<Element, kRanks, kLanes>(exchange, lane, branch[i]);
        } else if (params.other != nullptr) {
            Lane sum = Lane::unpack<Element>(branch[i]);
            sum.add(Lane::unpack<Element>(other[i]));
            branch[i] = sum.template pack<Element>();
        }
        total[i] = Lane::unpack<Element>(branch[i]);
        if (has_residual) total[i].add(Lane::unpack<Element>(residual[i]));
        squares += total[i].sum_of_squares();
    }
    __shared__ float partial[kMaxThreads / 32];
    const float sum = block_sum(squares, partial);
    if constexpr (kRanks > 1) {
        if (threadIdx.x == 0) params.last_slots[row] = slot;
    }
    store_row<Element, kLanes>(params, row, total, weight, sum);
}

}  // namespace tokenspeed::comm
