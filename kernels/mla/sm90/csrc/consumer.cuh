// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup of the swapped kernel: KV tokens (then latent dims) lie on the M side of the tensor-core
// instruction and query rows on its N side, so that 16 rows cost 16 columns and not a padded 64.
//
//   S^T[64 tokens x rows]  = K[64 x 576]    Q^T[576 x rows]       K, Q from shared memory
//   O^T[512 dims x rows]  += V^T[512 x 64]  P^T[64 x rows]        V is the same shared memory as K
//
// Thread (warp w, lane 4g + c) of the warpgroup holds tokens (dims) 16w + g and 16w + g + 8 of each 64-row fragment
// and columns 8j + 2c, 8j + 2c + 1.
#pragma once

#include "merge.cuh"

namespace tokenspeed::mla {

template <int kRows>
class Consumer {
 public:
  using L = Layout<kRows>;
  static constexpr int kGroupRows = L::kGroupRows;
  static constexpr int kColumns = kGroupRows / 4;   // columns per thread
  static constexpr int kFragment = kGroupRows / 2;  // accumulators per thread of a 64-row fragment
  static constexpr int kLatentBlocks = kLatent / 64;
  static constexpr float kRescaleLog2 = 8.0f;       // the maximum may lag by 2^8 before O is rescaled

  __device__ Consumer(const DecodeParams& p, const SharedMap<kRows>& shared, const Place& place, char* generic)
      : p_(p),
        shared_(shared),
        place_(place),
        map_(generic),
        generic_(generic),
        reduce_(reinterpret_cast<float4*>(generic + L::kReduceOffset)),
        state_(reinterpret_cast<float*>(generic + L::kStateOffset)),
        group_(ptx::warp_number() / 4),
        thread_(threadIdx.x & 127),
        warp_(ptx::warp_number() & 3),
        g_((threadIdx.x & 31) / 4),
        c_(threadIdx.x & 3),
        scale_(p.softmax_scale * 1.4426950408889634f) {}

  // The first round is a rehearsal on whatever shared memory holds, while the first KV tile is on its way: it brings
  // the code of the tile and of the epilogue into the instruction caches. It waits for nothing and releases nothing.
  __device__ void run(Span span) {
    const Merger<kRows> merger(p_, place_, generic_);
    int pending[2] = {-1, -1};
    int unit = 0;
    bool more = span.begin();
    for (int item = -1; item < 0 || more; ++item) {
      rehearsal_ = item < 0;
      const int tiles = rehearsal_ ? 2 : span.num_tiles;
      seq_len_ = rehearsal_ ? 0 : span.seq_len;
      const QuerySpan query(p_, place_, span.request);
      clear();
      if (!rehearsal_) ptx::barrier_wait(shared_.query_full(), item & 1);
#pragma unroll 1
      for (int t = L::kAlternate ? group_ : 0; t < tiles; t += L::kAlternate ? 2 : 1) {
        tile(query, rehearsal_ ? 0 : (span.first_tile + t) * kTileTokens, unit + t * kTileUnits);
        if (rehearsal_) break;
      }
      finish(span, query);
      if (rehearsal_) continue;
      if (!span.whole) {
        merger.signal(span.request);
        pending[span.first_tile == 0 ? 1 : 0] = span.request;
      }
      unit += span.num_tiles * kTileUnits;
      more = span.next(p_);
    }
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const int request = i == 0 ? pending[0] : pending[1];
      if (request >= 0) merger.merge(request);
    }
  }

 private:
  __device__ void clear() {
#pragma unroll
    for (int m = 0; m < kLatentBlocks; ++m)
#pragma unroll
      for (int i = 0; i < kFragment; ++i) out_[m][i] = 0.0f;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      max_[i] = -INFINITY;
      sum_[i] = 0.0f;
    }
    empty_ = true;
  }

  __device__ int column(int i) const { return 8 * (i / 2) + 2 * c_ + (i & 1); }
  __device__ int row(int i) const { return (L::kAlternate ? 0 : group_ * kGroupRows) + column(i); }
  __device__ void sync_group() { ptx::named_sync(1 + group_, 128); }
  __device__ void sync_both() { ptx::named_sync(3, kConsumerThreads); }

  __device__ void tile(const QuerySpan& query, int first_token, int unit) {
    float scores[kFragment];
    multiply_scores(scores, unit);
    if (first_token + kTileTokens > seq_len_ - query.query_tokens + 1) mask(scores, query, first_token);
    const int buffer = parity_;
    parity_ ^= 1;
    publish_maximum(scores, buffer);
    if (!L::kAlternate) sync_group();  // one probability buffer: the last tile's products have read it
    float sums[kColumns];
    if (!empty_) store_probabilities(scores, sums, buffer);
    if (first_token + kTileTokens > seq_len_ && !rehearsal_) clear_values(seq_len_ - first_token, unit);
    ptx::fence_async();
    sync_group();
    if (raise_maximum(buffer)) {
      store_probabilities(scores, sums, buffer);
      ptx::fence_async();
      sync_group();
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sum_[i] += sums[i];
    multiply_values(unit, buffer);
  }

  __device__ void multiply_scores(float (&scores)[kFragment], int unit) {
    const uint32_t query = shared_.query() + (L::kAlternate ? 0 : group_ * kGroupRows * 128);
#pragma unroll
    for (int u = 0; u < kTileUnits; ++u) {
      if (!rehearsal_) ptx::barrier_wait(shared_.full(unit + u), shared_.phase(unit + u));
      ptx::mma_fence();
      const uint64_t keys = ptx::operand_descriptor(shared_.unit(unit + u));
      const uint64_t queries = ptx::operand_descriptor(query + u * kUnitBlocks * kRows * 128);
#pragma unroll
      for (int block = 0; block < kUnitBlocks; ++block) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          ptx::mma<0>(scores, keys + block * (kBlockBytes >> 4) + 2 * k, queries + block * (kRows * 128 >> 4) + 2 * k,
                      (u | block | k) != 0);
        }
      }
    }
    ptx::mma_commit();
    ptx::mma_wait<0>();
  }

  // Row r of the tile sees the request's tokens up to its own.
  __device__ void mask(float (&scores)[kFragment], const QuerySpan& query, int first_token) {
    const int token = first_token + warp_ * 16 + g_;
    const int last = seq_len_ - (query.query_tokens - 1 - place_.token_in_request);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int visible = last + map_.token(row(i));
      const int low = 4 * (i / 2) + (i & 1);
      if (token >= visible) scores[low] = -INFINITY;
      if (token + 8 >= visible) scores[low + 2] = -INFINITY;
    }
  }

  __device__ void publish_maximum(const float (&scores)[kFragment], int buffer) {
    float* reduce = reinterpret_cast<float*>(reduce_ + (buffer * 2 + group_) * kGroupRows);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int low = 4 * (i / 2) + (i & 1);
      float value = fmaxf(scores[low], scores[low + 2]);
      value = fmaxf(value, __shfl_xor_sync(~0u, value, 4));
      value = fmaxf(value, __shfl_xor_sync(~0u, value, 8));
      value = fmaxf(value, __shfl_xor_sync(~0u, value, 16));
      if (g_ == 0) reduce[column(i) * 4 + warp_] = value;
    }
  }

  // Adopts the published maxima where the one in use lags too far; the same in all threads of the warpgroup.
  __device__ bool raise_maximum(int buffer) {
    float fresh[kColumns];
    bool raise = false;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float4 v = reduce_[(buffer * 2 + group_) * kGroupRows + column(i)];
      fresh[i] = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)) * scale_;
      // Rows past the tile hold leftovers of shared memory; they must not steer the others.
      raise |= map_.token(row(i)) != kNoRow && fresh[i] > max_[i] + kRescaleLog2;
    }
    if (!__any_sync(~0u, raise || empty_)) return false;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float next = fmaxf(max_[i], fresh[i]);
      const float factor = next == -INFINITY ? 1.0f : ptx::exp2_fast(max_[i] - next);
      max_[i] = next;
      sum_[i] *= factor;
      const int low = 4 * (i / 2) + (i & 1);
#pragma unroll
      for (int m = 0; m < kLatentBlocks; ++m) {
        out_[m][low] *= factor;
        out_[m][low + 2] *= factor;
      }
    }
    empty_ = false;
    return true;
  }

  // P^T as a K-major operand: row = query row, 64 tokens of 2 bytes, 128-byte swizzle.
  __device__ void store_probabilities(const float (&scores)[kFragment], float (&sums)[kColumns], int buffer) {
    uint32_t packed[kFragment / 2];
#pragma unroll
    for (int j = 0; j < kFragment / 4; ++j) {
      float value[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float limit = max_[2 * j + (i & 1)];
        value[i] = ptx::exp2_fast(fmaf(scores[4 * j + i], scale_, limit == -INFINITY ? 0.0f : -limit));
      }
      sums[2 * j] = value[0] + value[2];
      sums[2 * j + 1] = value[1] + value[3];
      packed[2 * j] = ptx::pack_bf16(value[0], value[1]);
      packed[2 * j + 1] = ptx::pack_bf16(value[2], value[3]);
    }
    const int lane = threadIdx.x & 31, r = lane & 7, matrix = lane >> 3;
    const int chunk = warp_ * 2 + (matrix & 1);
    const uint32_t address =
        shared_.probs(group_, L::kAlternate ? buffer : 0) + ((matrix >> 1) * 8 + r) * 128 + ((chunk ^ r) << 4);
#pragma unroll
    for (int j = 0; j < kFragment / 8; ++j) {
      ptx::store_transposed(address + j * 16 * 128, packed[4 * j], packed[4 * j + 1], packed[4 * j + 2],
                            packed[4 * j + 3]);
    }
  }

  // Rows past the end of the sequence may hold anything, NaN included, and 0 x NaN would reach O.
  __device__ void clear_values(int valid, int unit) {
#pragma unroll 1
    for (int block = 0; block < kLatentBlocks; ++block) {
      const uint32_t base = shared_.unit(unit + block / kUnitBlocks) + (block % kUnitBlocks) * kBlockBytes;
#pragma unroll 1
      for (int at = valid * 128 + thread_ * 16; at < kBlockBytes; at += 128 * 16) ptx::store_zeros(base + at);
    }
  }

  __device__ void multiply_values(int unit, int buffer) {
    const uint64_t probs = ptx::operand_descriptor(shared_.probs(group_, L::kAlternate ? buffer : 0));
    ptx::mma_fence();
#pragma unroll
    for (int m = 0; m < kLatentBlocks; ++m) {
      const uint64_t values = ptx::operand_descriptor(shared_.unit(unit + m / kUnitBlocks)) +
                              (m % kUnitBlocks) * (kBlockBytes >> 4);
#pragma unroll
      for (int k = 0; k < 4; ++k) ptx::mma<1>(out_[m], values + k * (2048 >> 4), probs + 2 * k, 1);
      if (m % kUnitBlocks == kUnitBlocks - 1 || m == kLatentBlocks - 1) ptx::mma_commit();
    }
    ptx::mma_wait<2>();
    release(unit);
    ptx::mma_wait<1>();
    release(unit + 1);
    ptx::mma_wait<0>();
    release(unit + 2);
  }

  __device__ void release(int unit) {
    if ((threadIdx.x & 31) == 0 && !rehearsal_) ptx::barrier_arrive(shared_.empty(unit));
  }

  // Joins the warpgroups' halves, normalizes and writes O and LSE, whole or as a partial of the merge.
  __device__ void finish(const Span& span, const QuerySpan& query) {
    float lse[kColumns];
    join_sums(lse);
    if (L::kAlternate) {
      join_outputs();
      ptx::fence_async();
      sync_both();
    }
    if ((threadIdx.x & 31) == 0 && !rehearsal_) ptx::barrier_arrive(shared_.query_empty());
    if (span.whole && !rehearsal_) {
      write_whole(query, lse);
    } else {
      write_partial(span.first_tile == 0 ? 1 : 0, lse);
    }
  }

  // Row sums and the joint maximum; scales O so that the warpgroups' O add up to the normalized output.
  __device__ void join_sums(float (&lse)[kColumns]) {
    float* reduce = reinterpret_cast<float*>(reduce_ + group_ * kGroupRows);
    sync_both();
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      float value = sum_[i];
      value += __shfl_xor_sync(~0u, value, 4);
      value += __shfl_xor_sync(~0u, value, 8);
      value += __shfl_xor_sync(~0u, value, 16);
      if (g_ == 0) {
        reduce[column(i) * 4 + warp_] = value;
        if (L::kAlternate && warp_ == 0) state_[group_ * kGroupRows + column(i)] = max_[i];
      }
    }
    sync_both();
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float4 own = reduce_[group_ * kGroupRows + column(i)];
      float total = own.x + own.y + own.z + own.w;
      float top = max_[i];
      if (L::kAlternate) {
        const float4 other = reduce_[(1 - group_) * kGroupRows + column(i)];
        const float other_max = state_[(1 - group_) * kGroupRows + column(i)];
        top = fmaxf(top, other_max);
        const float base = top == -INFINITY ? 0.0f : top;
        total = total * ptx::exp2_fast(max_[i] - base) +
                (other.x + other.y + other.z + other.w) * ptx::exp2_fast(other_max - base);
      }
      const bool none = !(total > 0.0f);
      lse[i] = none ? -INFINITY : top + ptx::log2_fast(total);
      const float factor = none ? 0.0f : __fdividef(ptx::exp2_fast(max_[i] - top), total);
      const int low = 4 * (i / 2) + (i & 1);
#pragma unroll
      for (int m = 0; m < kLatentBlocks; ++m) {
        out_[m][low] *= factor;
        out_[m][low + 2] *= factor;
      }
    }
  }

  // Warpgroup 0 ends with the sums of the lower latent half, warpgroup 1 with those of the upper half. They meet in
  // the query rows' memory, free once all scores of an item are done.
  __device__ void join_outputs() {
    const int stride = rehearsal_ ? 0 : 128;
    float* exchange = reinterpret_cast<float*>(generic_ + (rehearsal_ ? own_probs() : L::kQueryOffset)) + thread_;
#pragma unroll
    for (int owner = 0; owner < 2; ++owner) {
#pragma unroll
      for (int i = 0; i < kLatentBlocks / 2 * kFragment; ++i) {
        const int m = owner * kLatentBlocks / 2 + i / kFragment;
        if (group_ != owner) exchange[i * stride] = out_[m][i % kFragment];
      }
      sync_both();
#pragma unroll
      for (int i = 0; i < kLatentBlocks / 2 * kFragment; ++i) {
        const int m = owner * kLatentBlocks / 2 + i / kFragment;
        if (group_ == owner) out_[m][i % kFragment] += exchange[i * stride];
      }
      if (owner == 0) sync_both();
    }
  }

  __device__ void write_whole(const QuerySpan& query, const float (&lse)[kColumns]) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const RowTarget<kRows> target(p_, place_, query, map_, row(i));
      if (!target.exists) continue;
      __nv_bfloat16* out = target.out + warp_ * 16 + g_;
      const int low = 4 * (i / 2) + (i & 1);
#pragma unroll
      for (int m = 0; m < kLatentBlocks; ++m) {
        if (L::kAlternate && m / (kLatentBlocks / 2) != group_) continue;
        out[m * 64] = __float2bfloat16(out_[m][low]);
        out[m * 64 + 8] = __float2bfloat16(out_[m][low + 2]);
      }
      if (writes_lse()) *target.lse = lse[i] * kLn2;
    }
  }

  // In fragment order (merge.cuh), so that stores coalesce. The rehearsal writes to shared memory.
  __device__ void write_partial(int part_of_span, const float (&lse)[kColumns]) {
    const int64_t slot =
        (2 * place_.group + part_of_span) * int64_t{p_.head_tiles} * p_.token_tiles + place_.row_tile;
    const int stride = rehearsal_ ? 0 : 128;
    float4* out = rehearsal_ ? reinterpret_cast<float4*>(generic_ + own_probs())
                             : reinterpret_cast<float4*>(p_.partial_out) + slot * FragmentIndex<kRows>::kTotal;
    out += thread_;
    if (L::kAlternate) {
#pragma unroll
      for (int i = 0; i < kLatentBlocks / 2 * kFragment / 4; ++i) {
        const int m = i / (kFragment / 4), j = i % (kFragment / 4), n = m + kLatentBlocks / 2;
        const bool upper = group_ == 1;
        out[(i + (upper ? kLatentBlocks / 2 * kFragment / 4 : 0)) * stride] =
            make_float4(upper ? out_[n][4 * j] : out_[m][4 * j], upper ? out_[n][4 * j + 1] : out_[m][4 * j + 1],
                        upper ? out_[n][4 * j + 2] : out_[m][4 * j + 2], upper ? out_[n][4 * j + 3] : out_[m][4 * j + 3]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kLatentBlocks * kFragment / 4; ++i) {
        const int m = i / (kFragment / 4), j = i % (kFragment / 4);
        out[(group_ * kLatentBlocks * kFragment / 4 + i) * stride] =
            make_float4(out_[m][4 * j], out_[m][4 * j + 1], out_[m][4 * j + 2], out_[m][4 * j + 3]);
      }
    }
    if (writes_lse() && !rehearsal_) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) p_.partial_lse[slot * kRows + row(i)] = lse[i];
    }
  }

  __device__ int own_probs() const { return L::kProbOffset + group_ * L::kProbBuffers * L::kProbBytes; }
  __device__ bool writes_lse() const { return g_ == 0 && warp_ == 0 && (!L::kAlternate || group_ == 0); }

  const DecodeParams& p_;
  const SharedMap<kRows>& shared_;
  const Place& place_;
  RowMap<kRows> map_;
  char* generic_;
  float4* reduce_;  // [buffer][warpgroup][row] of one value per warp
  float* state_;    // [warpgroup][row]
  int group_, thread_, warp_, g_, c_;
  float scale_;  // softmax scale in base 2
  float out_[kLatentBlocks][kFragment];
  float max_[kColumns], sum_[kColumns];
  int seq_len_ = 0, parity_ = 0;
  bool empty_ = true, rehearsal_ = true;
};

}  // namespace tokenspeed::mla
