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

struct PlanParams {
    const int32_t* seq_lens;     // [requests]
    const int32_t* block_table;  // [requests, block_table_stride]
    int32_t* plan;
    int64_t block_table_stride;
    int32_t num_requests, groups, page_shift;
};

// The last request that starts at or before `tile`.
__device__ inline int find_request(const int32_t* tile_start, int num_requests, int tile) {
    int low = 0, high = num_requests;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (tile_start[middle] <= tile) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return max(low - 1, 0);
}

__device__ inline int sum_tiles(const PlanParams& p, int32_t* tile_start, int* scratch) {
    int tiles = 0;
    for (int base = 0; base < p.num_requests; base += kPlanThreads) {
        const int request = base + threadIdx.x;
        const int own = request < p.num_requests ? (max(p.seq_lens[request], 0) + kTileTokens - 1) / kTileTokens : 0;
        int chunk;
        const int end = tiles + block_scan(own, scratch, &chunk);
        if (request < p.num_requests) tile_start[request] = end - own;
        tiles += chunk;
    }
    if (threadIdx.x == 0) tile_start[p.num_requests] = tiles;
    return tiles;
}

__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const __grid_constant__ PlanParams p) {
    __shared__ int scratch[kPlanThreads / 32];
    const PlanView<int32_t> plan(p.plan, p.groups, p.num_requests);
    const int tiles = sum_tiles(p, plan.tile_start, scratch);
    __syncthreads();
    const int used = max(1, min(p.groups, tiles));  // every used group has at least one tile
    for (int group = threadIdx.x; group < p.groups; group += kPlanThreads) {
        const int begin = static_cast<int>(int64_t{min(group, used)} * tiles / used);
        const int end = static_cast<int>(int64_t{min(group + 1, used)} * tiles / used);
        const int request = find_request(plan.tile_start, p.num_requests, begin);
        const int tile = begin - plan.tile_start[request];
        const bool paged = end > begin && p.page_shift >= 6;
        plan.group_request[group] = request;
        plan.group_tile[group] = tile;
        plan.group_tiles[group] = end - begin;
        plan.group_seq_len[group] = p.num_requests > 0 ? p.seq_lens[request] : 0;
        plan.group_page[group] =
            paged ? p.block_table[request * p.block_table_stride + (tile * kTileTokens >> p.page_shift)] : 0;
    }
    for (int request = threadIdx.x; request < p.num_requests; request += kPlanThreads) {
        const int begin = plan.tile_start[request], end = plan.tile_start[request + 1];
        const bool some = end > begin;
        plan.first_group[request] = some ? static_cast<int>(((begin + int64_t{1}) * used - 1) / tiles) : 0;
        plan.last_group[request] = some ? static_cast<int>((int64_t{end} * used - 1) / tiles) : -1;
    }
}

}  // namespace tokenspeed::mla
