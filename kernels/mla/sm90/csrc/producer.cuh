// SPDX-License-Identifier: Apache-2.0
// The producer warps: one fills the ring of KV units, one the query rows, through the bulk tensor copy engine.
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
    __device__ uint32_t full(int index, int part = 0) const {
        return base + L::kBarrierOffset + ((index % L::kUnits) * L::kUnitParts + part) * 8;
    }
    __device__ uint32_t empty(int index, int part = 0) const {
        return full(index, part) + L::kUnits * L::kUnitParts * 8;
    }
    __device__ uint32_t query_full() const { return base + L::kBarrierOffset + 2 * L::kUnits * L::kUnitParts * 8; }
    __device__ uint32_t query_empty() const { return query_full() + 8; }
    __device__ uint32_t probs(int buffer) const { return base + L::kProbOffset + buffer * L::kProbBytes; }
};

// A group's span of the plan, walked request by request; an item is the part of one request.
struct Span {
    int request, seq_len, left, page;
    int first_tile, num_tiles;  // the current item
    bool whole;                 // it is all of its request

    __device__ Span(const DecodeParams& p, int group) : num_tiles(0) {
        const PlanView<const int32_t> plan(p.plan, p.groups, p.num_requests);
        request = plan.group_request[group];
        first_tile = plan.group_tile[group];
        left = plan.group_tiles[group];
        seq_len = plan.group_seq_len[group];
        page = plan.group_page[group];
    }

    // The first item, or the next one; false at the end of the span.
    __device__ bool begin() {
        if (left <= 0) return false;
        const int tiles = (seq_len + kTileTokens - 1) / kTileTokens;
        num_tiles = min(tiles - first_tile, left);
        whole = num_tiles == tiles;
        return true;
    }

    __device__ bool next(const DecodeParams& p) {
        left -= num_tiles;
        if (left <= 0) return false;
        first_tile = 0;
        do {
            seq_len = p.seq_lens[++request];
        } while (seq_len <= 0);
        return begin();
    }
};

// By one warp; the consumers give the query rows' memory back item by item.
template <int kRows>
__device__ void load_queries(const DecodeParams& p, const SharedMap<kRows>& shared, const Place& place, Span span,
                             const CUtensorMap* q_nope, const CUtensorMap* q_rope) {
    const int block_bytes = p.tile_query_tokens * p.tile_heads * kRowBytes;
    int item = 0;
    for (bool more = span.begin(); more; more = span.next(p), ++item) {
        const QuerySpan query(p, place, span.request);
        ptx::barrier_wait(shared.query_empty(), (item & 1) ^ 1);
        if ((threadIdx.x & 31) != 0) continue;
        ptx::barrier_expect(shared.query_full(), kDimBlocks * block_bytes);
#pragma unroll 1
        for (int block = 0; block < kDimBlocks - !kFp8; ++block) {
            ptx::copy_box(shared.query() + block * kRows * 128, q_nope, shared.query_full(), block * kBlockDims,
                          place.first_head, query.first_token);
        }
        if (kFp8) continue;
        ptx::copy_box(shared.query() + (kDimBlocks - 1) * kRows * 128, q_rope, shared.query_full(), 0, place.first_head,
                      query.first_token);
    }
}

template <int kRows>
class Producer {
  public:
    __device__ Producer(const DecodeParams& p, const SharedMap<kRows>& shared, const Span& span, const CUtensorMap* kv)
        : p_(p), shared_(shared), span_(span), kv_(kv), lane_(threadIdx.x & 31), box_shift_(min(p.page_shift, 6)) {
        if (!span_.begin()) return;
        if (p.page_shift >= 6) {
            page_[0] = span_.page;
        } else {
            fetch_pages(span_.first_tile);
        }
    }

    __device__ void run() {
        int unit = 0;
        bool first = true;
        for (bool more = span_.left > 0; more; more = span_.next(p_)) {
            if (!first) fetch_pages(span_.first_tile);
            first = false;
#pragma unroll 1
            for (int t = 0; t < span_.num_tiles; ++t, unit += kTileUnits) load_tile(span_.first_tile + t, unit);
        }
    }

  private:
    __device__ int boxes(int tile) const {
        const int valid = min(kTileTokens, span_.seq_len - tile * kTileTokens);
        return (valid + (1 << box_shift_) - 1) >> box_shift_;
    }

    // Lane i owns boxes i and i + 32 of every dim block; a page of at least 64 tokens is one box per tile.
    __device__ void fetch_pages(int tile) {
        const int32_t* table = p_.block_table + span_.request * p_.block_table_stride;
        const int count = boxes(tile);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int box = lane_ + 32 * i;
            if (box < count) page_[i] = table[(tile * kTileTokens + (box << box_shift_)) >> p_.page_shift];
        }
    }

    __device__ void load_tile(int tile, int unit) {
        const int count = boxes(tile);
        const int page[2] = {page_[0], page_[1]};
        if (tile + 1 < span_.first_tile + span_.num_tiles) fetch_pages(tile + 1);
        if constexpr (Layout<kRows>::kTurned) {
            load_parts(tile, unit, count, page);
        } else {
            load_units(tile, unit, count, page);
        }
    }

    __device__ void load_units(int tile, int unit, int count, const int (&page)[2]) {
#pragma unroll 1
        for (int u = 0; u < kTileUnits; ++u) {
            const int index = unit + u;
            ptx::barrier_wait(shared_.empty(index), shared_.phase(index) ^ 1);
            if (lane_ == 0) ptx::barrier_expect(shared_.full(index), kUnitBlocks * (count << box_shift_) * kRowBytes);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int box = lane_ + 32 * i;
                if (box >= count) continue;
                const int row = (tile * kTileTokens + (box << box_shift_)) & ((1 << p_.page_shift) - 1);
                const uint32_t destination = shared_.unit(index) + (box << box_shift_) * 128;
#pragma unroll 1
                for (int block = 0; block < kUnitBlocks; ++block) {
                    ptx::copy_box(destination + block * kBlockBytes, kv_, shared_.full(index),
                                  (u * kUnitBlocks + block) * kBlockDims, row, page[i]);
                }
            }
        }
    }

    // The half of the latent dims of the warpgroup that has the tile's scores, then the other half and the rope dims.
    // With an even number of units the parts of a unit are the same dims from tile to tile.
    __device__ void load_parts(int tile, int unit, int count, const int (&page)[2]) {
        constexpr bool kSameParts = Layout<kRows>::kUnits % 2 == 0;
#pragma unroll 1
        for (int part = 0; part < 2; ++part) {
            ptx::barrier_wait(shared_.empty(unit, kSameParts ? part : 1), shared_.phase(unit) ^ 1);
            const uint32_t full = shared_.full(unit, part);
            if (lane_ == 0) ptx::barrier_expect(full, (2 + part) * (count << box_shift_) * kRowBytes);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int box = lane_ + 32 * i;
                if (box >= count) continue;
                const int row = (tile * kTileTokens + (box << box_shift_)) & ((1 << p_.page_shift) - 1);
                const uint32_t destination = shared_.unit(unit) + (box << box_shift_) * 128;
#pragma unroll 1
                for (int b = 0; b < 2 + part; ++b) {
                    const int block = b == 2 ? kDimBlocks - 1 : 2 * ((unit & 1) ^ part) + b;
                    ptx::copy_box(destination + block * kBlockBytes, kv_, full, block * kBlockDims, row, page[i]);
                }
            }
        }
    }

    const DecodeParams& p_;
    const SharedMap<kRows>& shared_;
    Span span_;
    const CUtensorMap* kv_;
    int lane_, box_shift_;
    int page_[2] = {0, 0};
};

}  // namespace tokenspeed::mla
