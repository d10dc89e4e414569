// SPDX-License-Identifier: Apache-2.0
// Joins the partial outputs of a split request inside the decode kernel: every block that wrote a partial waits for
// the others of the request and then merges its share of the output. All blocks are resident (cooperative launch).
#pragma once

#include "rows.cuh"

namespace tokenspeed::mla {

// Partials lie in fragment order, values of 16 bytes: (low row, dim), (low row, dim + step), (high row, dim),
// (high row, dim + step).
//   narrow: [latent block][column block][thread], low row 8j + 2c, high row the next, dims 16w + g and 8 further
//   wide: [latent half][column block][thread], low row 16w + g, high row 8 further, dims 8j + 2c and the next
template <int kRows>
struct FragmentIndex {
  static constexpr int kTotal = kRows * kLatent / 4;
  static constexpr int kRowStep = Layout<kRows>::kWide ? 8 : 1, kDimStep = Layout<kRows>::kWide ? 1 : 8;
  int row, dim;

  __device__ explicit FragmentIndex(int index) {
    const int thread = index % 128, block = index / 128;
    const int across = thread / 32 * 16 + (thread / 4 & 7), along = 2 * (thread & 3);
    if (Layout<kRows>::kWide) {
      row = across;
      dim = 8 * block + along;
    } else {
      row = block % (kRows / 8) * 8 + along;
      dim = block / (kRows / 8) * 64 + across;
    }
  }
};

// One request that this block shares with others. Arrivals are counted in one of two words, by turns from launch to
// launch: [count 0, count 1, turn]. The last to arrive clears the other word and passes the turn, so nobody has to
// come back to reset what others still poll.
struct SharedRequest {
  int request = -1, first_group, splits, turn;

  __device__ static int32_t* words(const DecodeParams& p, const Place& place, int request) {
    return p.counters + 4 * (request * p.head_tiles * p.token_tiles + place.row_tile);
  }

  __device__ void open(const DecodeParams& p, const Place& place, int id) {
    const PlanView<const int32_t> plan(p.plan, p.groups, p.num_requests);
    request = id;
    first_group = plan.first_group[id];
    splits = plan.last_group[id] - first_group + 1;
    turn = ptx::load_cached_l2(words(p, place, id) + 2);
  }

  // By one thread, after a barrier behind the block's stores.
  __device__ void arrive(const DecodeParams& p, const Place& place) const {
    int32_t* counts = words(p, place, request);
    if (ptx::add_release(counts + turn, 1) == splits - 1) {
      counts[1 - turn] = 0;
      counts[2] = 1 - turn;
    }
  }

  __device__ void wait(const DecodeParams& p, const Place& place) const {
    const int32_t* count = words(p, place, request) + turn;
    while (ptx::load_acquire(count) < splits) {
    }
  }
};

template <int kRows>
class Merger {
 public:
  using Index = FragmentIndex<kRows>;

  __device__ Merger(const DecodeParams& p, const Place& place, char* generic)
      : p_(p),
        place_(place),
        map_(generic),
        sums_(reinterpret_cast<float4*>(generic + Layout<kRows>::kQueryOffset)),
        states_(sums_ + kConsumerThreads),
        thread_(threadIdx.x) {}

  __device__ void merge(const SharedRequest& shared) const {
    int share = 16;  // fragment values of 16 bytes per block
    while (share * shared.splits < Index::kTotal) share *= 2;
    const int begin = (place_.group - shared.first_group) * share;
    if (begin >= Index::kTotal) return;
    const int width = min(share, kConsumerThreads), shift = 31 - __clz(width);
    const QuerySpan query(p_, place_, shared.request);
#pragma unroll 1
    for (int offset = 0; offset < share; offset += width) {
      const int index = begin + offset + (thread_ & (width - 1));
      const Index at(index);
      const RowTarget<kRows> low(p_, place_, query, map_, at.row), high(p_, place_, query, map_, at.row + Index::kRowStep);
      if (offset == 0) {
        if (thread_ == 32) shared.wait(p_, place_);
      }
      ptx::named_sync(3, kConsumerThreads);
      State state;
      sum_splits(shared, index, at.row, thread_ >> shift, kConsumerThreads >> shift, state);
      sums_[thread_] = state.sum;
      states_[thread_] = make_float4(state.top[0], state.top[1], state.total[0], state.total[1]);
      ptx::named_sync(3, kConsumerThreads);
      if (thread_ < width) {
        join_shares(width, kConsumerThreads >> shift, state);
        write(low, at.dim, state.sum.x, state.sum.y, state.top[0], state.total[0]);
        write(high, at.dim, state.sum.z, state.sum.w, state.top[1], state.total[1]);
      }
    }
  }

 private:
  // Weighted sum over some splits, for the two rows of a fragment value.
  struct State {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float top[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
  };

  __device__ void sum_splits(const SharedRequest& shared, int index, int row, int from, int step, State& state) const {
    constexpr int kBatch = kRows == 16 ? 9 : 8;
    const float4* partial = reinterpret_cast<const float4*>(p_.partial_out) + index;
    const float* states = p_.partial_lse + row;
    const int row_tiles = p_.head_tiles * p_.token_tiles;
#pragma unroll 1
    for (int first = from; first < shared.splits; first += kBatch * step) {
      float4 values[kBatch];
      float2 lse[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int split = first + i * step;
        const int slot = (2 * (shared.first_group + split) + (split == 0)) * row_tiles + place_.row_tile;
        const bool exists = split < shared.splits;
        values[i] = exists ? ptx::load_cached_l2(partial + int64_t{slot} * Index::kTotal)
                           : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        lse[i] = exists ? load_states(states + int64_t{slot} * kRows) : make_float2(-INFINITY, -INFINITY);
      }
      float low = state.top[0], high = state.top[1];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        low = fmaxf(low, lse[i].x);
        high = fmaxf(high, lse[i].y);
      }
      rescale(state, low, high);
      const float low_base = finite(low), high_base = finite(high);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        add(state, values[i], ptx::exp2_fast(lse[i].x - low_base), ptx::exp2_fast(lse[i].y - high_base));
      }
    }
  }

  __device__ static float2 load_states(const float* low) {
    if constexpr (Index::kRowStep == 1) return ptx::load_cached_l2(reinterpret_cast<const float2*>(low));
    return make_float2(ptx::load_cached_l2(low), ptx::load_cached_l2(low + Index::kRowStep));
  }

  __device__ static float finite(float top) { return top == -INFINITY ? 0.0f : top; }

  __device__ static void add(State& state, const float4& v, float low, float high) {
    state.sum.x += low * v.x;
    state.sum.y += low * v.y;
    state.sum.z += high * v.z;
    state.sum.w += high * v.w;
    state.total[0] += low;
    state.total[1] += high;
  }

  __device__ static void rescale(State& state, float low, float high) {
    const float a = ptx::exp2_fast(state.top[0] - finite(low)), b = ptx::exp2_fast(state.top[1] - finite(high));
    state.sum = make_float4(state.sum.x * a, state.sum.y * a, state.sum.z * b, state.sum.w * b);
    state.total[0] *= a;
    state.total[1] *= b;
    state.top[0] = low;
    state.top[1] = high;
  }

  __device__ void join_shares(int width, int shares, State& state) const {
    float low = -INFINITY, high = -INFINITY;
#pragma unroll 4
    for (int other = 0; other < shares; ++other) {
      const float4 s = states_[thread_ + other * width];
      low = fmaxf(low, s.x);
      high = fmaxf(high, s.y);
    }
    state = State{};
    state.top[0] = low;
    state.top[1] = high;
    low = finite(low);
    high = finite(high);
#pragma unroll 4
    for (int other = 0; other < shares; ++other) {
      const float4 v = sums_[thread_ + other * width], s = states_[thread_ + other * width];
      const float a = ptx::exp2_fast(s.x - low), b = ptx::exp2_fast(s.y - high);
      state.sum.x += a * v.x;
      state.sum.y += a * v.y;
      state.sum.z += b * v.z;
      state.sum.w += b * v.w;
      state.total[0] += a * s.z;
      state.total[1] += b * s.w;
    }
  }

  __device__ static void write(const RowTarget<kRows>& target, int dim, float first, float second, float top,
                               float total) {
    if (!target.exists) return;
    const float scale = total > 0.0f ? __fdividef(1.0f, total) : 0.0f;
    target.out[dim] = __float2bfloat16(first * scale);
    target.out[dim + Index::kDimStep] = __float2bfloat16(second * scale);
    if (dim == 0) *target.lse = total > 0.0f ? (top + ptx::log2_fast(total)) * kLn2 : -INFINITY;
  }

  const DecodeParams& p_;
  const Place& place_;
  RowMap<kRows> map_;
  float4 *sums_, *states_;  // [thread]; they lie where the query rows were
  int thread_;
};

}  // namespace tokenspeed::mla
