// SPDX-License-Identifier: Apache-2.0
// MLA decode for Hopper, up to 64 folded query rows per row tile. Grid: groups x row tiles, one block per SM.
#pragma once

#include "consumer.cuh"

namespace tokenspeed::mla {

template <int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    decode_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ CUtensorMap q_nope,
                  const __grid_constant__ CUtensorMap q_rope, const __grid_constant__ CUtensorMap kv) {
  using L = Layout<kRows>;
  extern __shared__ __align__(1024) char generic[];  // the 128-byte swizzle repeats every 1024 bytes
  const SharedMap<kRows> shared{ptx::shared_address(generic)};
  const int group = blockIdx.x % p.groups, row_tile = blockIdx.x / p.groups;
  if (threadIdx.x == kConsumerThreads) {
    ptx::prefetch_map(&q_nope);
    ptx::prefetch_map(&q_rope);
    ptx::prefetch_map(&kv);
    for (int i = 0; i < L::kUnits; ++i) {
      ptx::barrier_init(shared.full(i), 1);
      ptx::barrier_init(shared.empty(i), L::kAlternate ? 4 : 8);  // the warps that read the unit
    }
    ptx::barrier_init(shared.query_full(), 1);
    ptx::barrier_init(shared.query_empty(), 8);
    ptx::fence_barrier_init();
  }
  __syncthreads();
  ptx::allow_dependents();
  const PlanView plan(p.plan, p.groups, p.num_requests);
  const Span span(p, plan, group);
  const int warp = ptx::warp_number();
  if (warp >= kConsumerThreads / 32) {
    ptx::shrink_registers<kProducerRegisters>();
    if (warp == kConsumerThreads / 32) Producer<kRows>(p, shared, &q_nope, &q_rope, &kv).run(span, row_tile);
  } else {
    ptx::grow_registers<kConsumerRegisters>();
    Consumer<kRows>(p, shared, generic).run(span, row_tile, group);
  }
}

}  // namespace tokenspeed::mla
