// SPDX-License-Identifier: Apache-2.0
// The producer warp: fills the ring of KV units and the query rows through the bulk tensor copy engine.
#pragma once

#include "geometry.cuh"
#include "ptx.cuh"

namespace tokenspeed::mla {

// Addresses of one block's shared memory; slot and phase arithmetic of the KV ring.
template <int kRows>
struct SharedMap {
  using L = Layout<kRows>;
  uint32_t base;

  __device__ uint32_t query() const { return base + L::kQueryOffset; }
  __device__ uint32_t unit(int index) const { return base + L::kRingOffset + (index % L::kUnits) * kUnitBytes; }
  __device__ uint32_t phase(int index) const { return (index / L::kUnits) & 1; }
  __device__ uint32_t full(int index) const { return base + L::kBarrierOffset + (index % L::kUnits) * 8; }
  __device__ uint32_t empty(int index) const { return full(index) + L::kUnits * 8; }
  __device__ uint32_t query_full() const { return base + L::kBarrierOffset + 2 * L::kUnits * 8; }
  __device__ uint32_t query_empty() const { return query_full() + 8; }
  __device__ uint32_t probs(int group, int buffer) const {
    return base + L::kProbOffset + (group * L::kProbBuffers + buffer) * L::kProbBytes;
  }
};

// A group's span of the plan, walked request by request.
struct Span {
  int request, tile, left;
  int first_tile, num_tiles;  // tiles of the current request that fall in this span
  bool whole;                 // they are all tiles of the request

  __device__ Span(const DecodeParams& p, const PlanView& plan, int group)
      : request(plan.group_request[group]), tile(plan.group_tile[group]), left(plan.group_tiles[group]) {}

  __device__ bool next(const DecodeParams& p) {
    if (left <= 0) return false;
    int tiles = tiles_of(p);
    while (tiles <= tile) {  // requests without tokens
      ++request;
      tile = 0;
      tiles = tiles_of(p);
    }
    first_tile = tile;
    num_tiles = min(tiles - tile, left);
    whole = num_tiles == tiles;
    return true;
  }

  __device__ void advance() {
    left -= num_tiles;
    ++request;
    tile = 0;
  }

 private:
  __device__ int tiles_of(const DecodeParams& p) const {
    return (p.seq_lens[request] + kTileTokens - 1) / kTileTokens;
  }
};

template <int kRows>
class Producer {
 public:
  __device__ Producer(const DecodeParams& p, const SharedMap<kRows>& shared, const CUtensorMap* q_nope,
                      const CUtensorMap* q_rope, const CUtensorMap* kv)
      : p_(p), shared_(shared), q_nope_(q_nope), q_rope_(q_rope), kv_(kv), lane_(threadIdx.x & 31) {
    box_tokens_ = min(p.page_tokens, kTileTokens);
  }

  __device__ void run(Span span, int row_tile) {
    int item = 0;
    for (int unit = 0; span.next(p_); span.advance(), ++item) {
      const RowTile rows(p_, span.request, row_tile);
      // The first query leads; a later one must wait for the consumers, so two KV tiles are requested before it.
      const int query_at = item == 0 ? 0 : min(2, span.num_tiles);
      for (int t = 0; t < span.num_tiles; ++t, unit += kTileUnits) {
        if (t == query_at) load_query(rows, item);
        load_tile(span.request, (span.first_tile + t) * kTileTokens, rows.seq_len, unit);
      }
      if (query_at == span.num_tiles) load_query(rows, item);
    }
  }

 private:
  __device__ void load_query(const RowTile& rows, int item) {
    ptx::barrier_wait(shared_.query_empty(), (item & 1) ^ 1);
    if (lane_ == 0) {
      const int block_bytes = p_.tile_query_tokens * p_.tile_heads * kBlockDims * 2;
      ptx::barrier_expect(shared_.query_full(), kDimBlocks * block_bytes);
    }
    __syncwarp();
    if (lane_ < kDimBlocks) {
      const bool rope = lane_ == kDimBlocks - 1;
      ptx::copy_box(shared_.query() + lane_ * kRows * 128, rope ? q_rope_ : q_nope_, shared_.query_full(),
                    rope ? 0 : lane_ * kBlockDims, rows.first_head, rows.first_token);
    }
  }

  // Lane i owns boxes i and i + 32 of a dim block; a page of at least 64 tokens is one box per tile.
  __device__ void load_tile(int request, int first_token, int seq_len, int unit) {
    const int valid = min(kTileTokens, seq_len - first_token);
    const int boxes = (valid + box_tokens_ - 1) / box_tokens_;
    const int32_t* table = p_.block_table + request * p_.block_table_stride;
    int page[2], row[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = first_token + (lane_ + 32 * i) * box_tokens_;
      row[i] = token % p_.page_tokens;
      page[i] = lane_ + 32 * i < boxes ? table[token / p_.page_tokens] : 0;
    }
#pragma unroll
    for (int u = 0; u < kTileUnits; ++u) {
      const int index = unit + u;
      ptx::barrier_wait(shared_.empty(index), shared_.phase(index) ^ 1);
      if (lane_ == 0) ptx::barrier_expect(shared_.full(index), kUnitBlocks * boxes * box_tokens_ * kBlockDims * 2);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int box = lane_ + 32 * i;
        if (box >= boxes) continue;
        for (int block = 0; block < kUnitBlocks; ++block) {
          const uint32_t destination = shared_.unit(index) + block * kBlockBytes + box * box_tokens_ * 128;
          ptx::copy_box(destination, kv_, shared_.full(index), (u * kUnitBlocks + block) * kBlockDims, row[i], page[i]);
        }
      }
    }
  }

  const DecodeParams& p_;
  const SharedMap<kRows>& shared_;
  const CUtensorMap *q_nope_, *q_rope_, *kv_;
  int lane_, box_tokens_;
};

}  // namespace tokenspeed::mla
