// SPDX-License-Identifier: Apache-2.0
// Joins the partial outputs of split requests, and writes zeros and -inf for rows that read no KV.
#pragma once

#include <math.h>

#include "geometry.cuh"
#include "ptx.cuh"

namespace tokenspeed::mla {

constexpr int kMergeThreads = 512;
constexpr int kMergeWarps = kMergeThreads / 32;

// Decodes the fragment order in which partials are stored (consumer.cuh, write_partial).
template <int kRows>
struct FragmentIndex {
  static constexpr int kGroupRows = Layout<kRows>::kGroupRows;
  static constexpr int kColumnBlocks = kGroupRows / 8;
  static constexpr int kTotal = kRows * kLatent / 4;
  int row, dim;

  __device__ explicit FragmentIndex(int index) {
    const int thread = index % 128, block = index / 128;
    const int j = block % kColumnBlocks, m = block / kColumnBlocks % (kLatent / 64);
    row = block / (kColumnBlocks * (kLatent / 64)) * kGroupRows + 8 * j + 2 * (thread & 3);
    dim = m * 64 + thread / 32 * 16 + (thread / 4 & 7);
  }
};

__device__ inline int64_t partial_slot(int first_group, int split) {
  return split == 0 ? 2 * first_group + 1 : 2 * (first_group + split);
}

__device__ inline void write_row(const DecodeParams& p, const RowTile& rows, int row, int dim, float low, float high) {
  if (!rows.holds(row, p)) return;
  const int64_t token = rows.first_token + row / p.tile_heads;
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.out) + token * p.out_token_stride +
                       (rows.first_head + row % p.tile_heads) * p.out_head_stride + dim;
  out[0] = __float2bfloat16(low);
  out[8] = __float2bfloat16(high);
}

__device__ inline void write_lse(const DecodeParams& p, const RowTile& rows, int row, float lse_log2) {
  if (!rows.holds(row, p)) return;
  const int64_t token = rows.first_token + row / p.tile_heads;
  p.lse[token * p.num_heads + rows.first_head + row % p.tile_heads] = lse_log2 * 0.6931471805599453f;
}

// Rows of a request without KV, and rows past the last request (CUDA-graph padding).
__device__ inline void clear_tokens(const DecodeParams& p, int first, int last) {
  const int64_t count = int64_t{last - first} * p.num_heads * kLatent;
  for (int64_t i = blockIdx.x * kMergeThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kMergeThreads) {
    const int64_t head = i / kLatent % p.num_heads, token = first + i / kLatent / p.num_heads;
    static_cast<__nv_bfloat16*>(p.out)[token * p.out_token_stride + head * p.out_head_stride + i % kLatent] =
        __float2bfloat16(0.0f);
    if (i % kLatent == 0) p.lse[token * p.num_heads + head] = -INFINITY;
  }
}

// weights[split * kRows + row], for rows [first_row, first_row + num_rows); a warp per row.
template <int kRows>
__device__ void merge_weights(const DecodeParams& p, const RowTile& rows, int first_group, int splits, int first_row,
                              int num_rows, bool write, float* weights) {
  const int lane = threadIdx.x & 31;
  for (int row = first_row + threadIdx.x / 32; row < first_row + num_rows; row += kMergeWarps) {
    float top = -INFINITY;
    for (int s = lane; s < splits; s += 32) {
      const float lse = p.partial_lse[(partial_slot(first_group, s) * p.row_tiles + blockIdx.y) * kRows + row];
      weights[s * kRows + row] = lse;
      top = fmaxf(top, lse);
    }
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    const float base = top == -INFINITY ? 0.0f : top;
    float total = 0.0f;
    for (int s = lane; s < splits; s += 32) total += exp2f(weights[s * kRows + row] - base);
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
    for (int s = lane; s < splits; s += 32) {
      weights[s * kRows + row] = total > 0.0f ? exp2f(weights[s * kRows + row] - base) / total : 0.0f;
    }
    if (write && lane == 0) write_lse(p, rows, row, total > 0.0f ? base + log2f(total) : -INFINITY);
  }
}

// Grid: column chunks x row tiles x (requests + 1); the last slice clears padding. A block owns kTotal / gridDim.x
// fragment values of 16 bytes: 32 per warp, warps beyond that share the splits.
template <int kRows>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ DecodeParams p) {
  using Index = FragmentIndex<kRows>;
  extern __shared__ float weights[];
  __shared__ float4 sums[kMergeThreads];
  ptx::wait_for_primary();
  const int request = blockIdx.z;
  if (request == p.num_requests) {
    const int used = p.query_starts ? p.query_starts[request] : request * p.max_query_tokens;
    if (blockIdx.y == 0) clear_tokens(p, used, p.num_tokens);
    return;
  }
  const PlanView plan(p.plan, p.groups, p.num_requests);
  const int first = plan.first_group[request], splits = plan.last_group[request] - first + 1;
  if (splits == 1) return;
  const RowTile rows(p, request, blockIdx.y);
  if (splits <= 0) {
    if (blockIdx.y == 0) clear_tokens(p, rows.first_token, rows.first_token + rows.query_tokens);
    return;
  }
  const int values = Index::kTotal / gridDim.x, column_warps = values / 32;
  const int begin = blockIdx.x * values;
  const bool narrow = values <= 128;  // one column block: 8 rows
  const Index corner(begin);
  const bool writes_lse = narrow ? corner.dim == 0 : begin == 0;
  merge_weights<kRows>(p, rows, first, splits, narrow ? corner.row : 0, narrow ? 8 : kRows, writes_lse, weights);
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int index = begin + warp % column_warps * 32 + lane, share = warp / column_warps;
  const int shares = kMergeWarps / column_warps;
  const Index at(index);
  const float4* partial = reinterpret_cast<const float4*>(p.partial_out);
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
  for (int s = share; s < splits; s += shares) {
    const float4 v = partial[(partial_slot(first, s) * p.row_tiles + blockIdx.y) * Index::kTotal + index];
    const float w0 = weights[s * kRows + at.row], w1 = weights[s * kRows + at.row + 1];
    sum.x += w0 * v.x;
    sum.y += w1 * v.y;
    sum.z += w0 * v.z;
    sum.w += w1 * v.w;
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (share != 0) return;
  for (int other = 1; other < shares; ++other) {
    const float4 v = sums[threadIdx.x + other * column_warps * 32];
    sum.x += v.x;
    sum.y += v.y;
    sum.z += v.z;
    sum.w += v.w;
  }
  write_row(p, rows, at.row, at.dim, sum.x, sum.z);
  write_row(p, rows, at.row + 1, at.dim, sum.y, sum.w);
}

}  // namespace tokenspeed::mla
