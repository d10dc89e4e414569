// SPDX-License-Identifier: Apache-2.0
// MLA decode for Hopper, up to 64 folded query rows per row tile. Grid: (groups, head tiles, token tiles), one block
// per multiprocessor.
#pragma once

#include <type_traits>

#include "consumer.cuh"
#include "turned.cuh"
#include "wide.cuh"
#include "wide_paired.cuh"

namespace tokenspeed::mla {

// By the lanes of one warp.
template <int kRows>
__device__ void init_barriers(const SharedMap<kRows>& shared) {
    constexpr int kParts = Layout<kRows>::kUnitParts, kBarriers = Layout<kRows>::kUnits * kParts;
    const int lane = threadIdx.x & 31, part = lane % kParts;
    if (lane < kBarriers) {
        ptx::barrier_init(shared.full(lane / kParts, part), 1);
        ptx::barrier_init(shared.empty(lane / kParts, part), part == 1 ? 8 : Layout<kRows>::kReaders);
    } else if (lane == kBarriers) {
        ptx::barrier_init(shared.query_full(), 1);
        ptx::barrier_init(shared.query_empty(), 8);
    }
    ptx::fence_barrier_init();
}

template <int kRows, bool kPaired>
__global__ void __launch_bounds__(kThreads, 1)
    decode_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ CUtensorMap q_nope,
                  const __grid_constant__ CUtensorMap q_rope, const __grid_constant__ CUtensorMap kv) {
    extern __shared__ __align__(1024) char generic[];  // the 128-byte swizzle repeats every 1024 bytes
    const SharedMap<kRows> shared{ptx::shared_address(generic)};
    const Place place(p);
    constexpr int kFirstIdle = kConsumerThreads + 32;
    if (threadIdx.x / 32 == kConsumerThreads / 32) init_barriers<kRows>(shared);
    if (threadIdx.x == 0) {
        ptx::prefetch_map(&q_nope);
        ptx::prefetch_map(&q_rope);
        ptx::prefetch_map(&kv);
    }
    if (threadIdx.x >= kFirstIdle) RowMap<kRows>(generic).fill(p, threadIdx.x - kFirstIdle, kThreads - kFirstIdle);
    ptx::wait_for_primary();
    ptx::allow_dependents();
    const Span span(p, place.group);
    const int warp = ptx::warp_number();
    __syncthreads();
    if (warp >= kConsumerThreads / 32) {
        ptx::shrink_registers<kProducerRegisters>();
        if (warp == kConsumerThreads / 32) {
            Producer<kRows>(p, shared, span, &kv).run();
        } else if (warp == kConsumerThreads / 32 + 1) {
            load_queries<kRows>(p, shared, place, span, &q_nope, &q_rope);
        } else if (warp == kConsumerThreads / 32 + 2) {
            clear_empty_rows<kRows>(p, place, threadIdx.x & 31, 32);
        }
    } else {
        ptx::grow_registers<kConsumerRegisters>();
        if constexpr (Layout<kRows>::kTurned) {
            TurnedConsumer<kRows>(p, shared, place, generic).run(span);
        } else if constexpr (Layout<kRows>::kWide) {
            std::conditional_t<kPaired, PairedConsumer, WideConsumer>(p, shared, place, generic).run(span);
        } else {
            Consumer<kRows>(p, shared, place, generic).run(span);
        }
    }
}

}  // namespace tokenspeed::mla
