// SPDX-License-Identifier: Apache-2.0
// The split plan, computed on the device once per step from the real lengths: the KV tiles of all requests, laid end
// to end, are dealt to the groups in equal contiguous spans. A request may be split unevenly, or not at all.
#pragma once

#include "geometry.cuh"

namespace tokenspeed::mla {

constexpr int kPlanThreads = 256;

// Inclusive prefix sum over the block; `scratch` holds one value per warp.
__device__ inline int block_scan(int value, int* scratch, int* total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  if (lane == 31) scratch[warp] = value;
  __syncthreads();
  int before = 0, all = 0;
  for (int w = 0; w < kPlanThreads / 32; ++w) {
    if (w < warp) before += scratch[w];
    all += scratch[w];
  }
  __syncthreads();
  *total = all;
  return value + before;
}

__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(const int32_t* seq_lens, int32_t* plan_memory, int num_requests, int groups) {
  __shared__ int scratch[kPlanThreads / 32];
  const PlanView<int32_t> plan(plan_memory, groups, num_requests);
  int32_t* tile_start = plan.tile_start;
  int tiles = 0;
  for (int base = 0; base < num_requests; base += kPlanThreads) {
    const int request = base + threadIdx.x;
    const int own = request < num_requests ? (max(seq_lens[request], 0) + kTileTokens - 1) / kTileTokens : 0;
    int chunk;
    const int end = tiles + block_scan(own, scratch, &chunk);
    if (request < num_requests) tile_start[request] = end - own;
    tiles += chunk;
  }
  if (threadIdx.x == 0) tile_start[num_requests] = tiles;
  __syncthreads();
  const int used = max(1, min(groups, tiles));  // every used group has at least one tile
  for (int group = threadIdx.x; group < groups; group += kPlanThreads) {
    const int begin = static_cast<int>(int64_t{min(group, used)} * tiles / used);
    const int end = static_cast<int>(int64_t{min(group + 1, used)} * tiles / used);
    int low = 0, high = num_requests;  // the last request that starts at or before `begin`
    while (low < high) {
      const int middle = (low + high) / 2;
      if (tile_start[middle] <= begin) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    plan.group_request[group] = max(low - 1, 0);
    plan.group_tile[group] = begin - tile_start[max(low - 1, 0)];
    plan.group_tiles[group] = end - begin;
    plan.group_seq_len[group] = num_requests > 0 ? seq_lens[max(low - 1, 0)] : 0;
  }
  for (int request = threadIdx.x; request < num_requests; request += kPlanThreads) {
    const int begin = tile_start[request], end = tile_start[request + 1];
    const bool some = end > begin;
    plan.first_group[request] = some ? static_cast<int>(((begin + int64_t{1}) * used - 1) / tiles) : 0;
    plan.last_group[request] = some ? static_cast<int>((int64_t{end} * used - 1) / tiles) : -1;
  }
}

}  // namespace tokenspeed::mla
