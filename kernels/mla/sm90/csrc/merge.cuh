// SPDX-License-Identifier: Apache-2.0
// Joins the partial outputs of a split request inside the decode kernel: every block that wrote a partial waits for
// the others of the request and then merges its share of the output. All blocks are resident (cooperative launch).
#pragma once

#include "rows.cuh"

namespace tokenspeed::mla {

__device__ inline int64_t partial_slot(int first_group, int split) {
  return split == 0 ? 2 * first_group + 1 : 2 * (first_group + split);
}

// Partials lie in fragment order: [warpgroup part][latent block][column block][thread] of 4 values:
// (row, dim), (row + 1, dim), (row, dim + 8), (row + 1, dim + 8).
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

template <int kRows>
class Merger {
 public:
  using Index = FragmentIndex<kRows>;

  __device__ Merger(const DecodeParams& p, const Place& place, char* generic)
      : p_(p), place_(place), map_(generic), weights_(reinterpret_cast<float*>(generic + Layout<kRows>::kQueryOffset)),
        sums_(reinterpret_cast<float4*>(generic + Layout<kRows>::kQueryOffset) + kScratchOffset), thread_(threadIdx.x) {
  }

  // After a partial of this block has been written by all consumer threads.
  __device__ void signal(int request) const {
    ptx::named_sync(3, kConsumerThreads);
    if (thread_ == 0) ptx::add_release(counter(request), 1);
  }

  __device__ void merge(int request) const {
    const PlanView<const int32_t> plan(p_.plan, p_.groups, p_.num_requests);
    const int first = plan.first_group[request], splits = plan.last_group[request] - first + 1;
    if (thread_ == 0) {
      while (ptx::load_acquire(counter(request)) < splits) {
      }
    }
    ptx::named_sync(3, kConsumerThreads);
    int share = 16;  // fragment values of 16 bytes per block; a small share stays inside one column block
    while (share * splits < Index::kTotal) share *= 2;
    const int begin = (place_.group - first) * share;
    if (begin < Index::kTotal) merge_share(QuerySpan(p_, place_, request), first, splits, begin, share);
    ptx::named_sync(3, kConsumerThreads);
    if (thread_ == 0 && ptx::add_relaxed(counter(request) + 1, 1) == splits - 1) {
      counter(request)[0] = 0;  // everyone has passed the wait: ready for the next launch
      counter(request)[1] = 0;
    }
  }

 private:
  static constexpr int kScratchOffset = kRows == 64 ? 1024 : 512;  // past the weights, in units of 16 bytes

  __device__ int32_t* counter(int request) const {
    return p_.counters + 2 * (int64_t{request} * p_.head_tiles * p_.token_tiles + place_.row_tile);
  }

  __device__ int64_t slot(int first, int split) const {
    return partial_slot(first, split) * p_.head_tiles * p_.token_tiles + place_.row_tile;
  }

  __device__ void merge_share(const QuerySpan& query, int first, int splits, int begin, int share) const {
    const Index corner(begin);
    const bool narrow = share <= 128;
    const int first_row = narrow ? corner.row : 0, num_rows = narrow ? 8 : kRows;
    compute_weights(query, first, splits, first_row, num_rows, narrow ? corner.dim == 0 : begin == 0);
    ptx::named_sync(3, kConsumerThreads);
    const int width = min(share, kConsumerThreads), shares = kConsumerThreads / width;
    for (int offset = 0; offset < share; offset += width) {
      const int index = begin + offset + thread_ % width;
      const Index at(index);
      sums_[thread_] = sum_splits(first, splits, index, thread_ / width, shares, at.row - first_row, num_rows);
      ptx::named_sync(3, kConsumerThreads);
      if (thread_ < width) {
        float4 sum = sums_[thread_];
        for (int other = 1; other < shares; ++other) add(sum, sums_[thread_ + other * width], 1.0f, 1.0f);
        write(query, at.row, at.dim, sum.x, sum.z);
        write(query, at.row + 1, at.dim, sum.y, sum.w);
      }
      ptx::named_sync(3, kConsumerThreads);
    }
  }

  // weights_[split * num_rows + row - first_row]; a warp per row.
  __device__ void compute_weights(const QuerySpan& query, int first, int splits, int first_row, int num_rows,
                                  bool writes_lse) const {
    const int lane = thread_ & 31;
#pragma unroll 1
    for (int row = thread_ / 32; row < num_rows; row += kConsumerThreads / 32) {
      float top = -INFINITY;
      for (int s = lane; s < splits; s += 32) {
        const float lse = ptx::load_cached_l2(p_.partial_lse + slot(first, s) * kRows + first_row + row);
        weights_[s * num_rows + row] = lse;
        top = fmaxf(top, lse);
      }
      for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
      const float base = top == -INFINITY ? 0.0f : top;
      float total = 0.0f;
      for (int s = lane; s < splits; s += 32) total += ptx::exp2_fast(weights_[s * num_rows + row] - base);
      for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
      const float scale = total > 0.0f ? __fdividef(1.0f, total) : 0.0f;
      for (int s = lane; s < splits; s += 32)
        weights_[s * num_rows + row] = ptx::exp2_fast(weights_[s * num_rows + row] - base) * scale;
      if (writes_lse && lane == 0) {
        const RowTarget<kRows> target(p_, place_, query, map_, first_row + row);
        if (target.exists) *target.lse = total > 0.0f ? (base + log2f(total)) * kLn2 : -INFINITY;
      }
    }
  }

  __device__ static void add(float4& sum, const float4& v, float low, float high) {
    sum.x += low * v.x;
    sum.y += high * v.y;
    sum.z += low * v.z;
    sum.w += high * v.w;
  }

  __device__ float4 sum_splits(int first, int splits, int index, int from, int step, int row, int num_rows) const {
    const float4* partial = reinterpret_cast<const float4*>(p_.partial_out) + index;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int s = from; s < splits; s += step) {
      const float4 v = ptx::load_cached_l2(partial + slot(first, s) * Index::kTotal);
      add(sum, v, weights_[s * num_rows + row], weights_[s * num_rows + row + 1]);
    }
    return sum;
  }

  __device__ void write(const QuerySpan& query, int row, int dim, float low, float high) const {
    const RowTarget<kRows> target(p_, place_, query, map_, row);
    if (!target.exists) return;
    target.out[dim] = __float2bfloat16(low);
    target.out[dim + 8] = __float2bfloat16(high);
  }

  const DecodeParams& p_;
  const Place& place_;
  RowMap<kRows> map_;
  float* weights_;
  float4* sums_;
  int thread_;
};

}  // namespace tokenspeed::mla
