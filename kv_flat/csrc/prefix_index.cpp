// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/prefix_index.h"

#include <algorithm>
#include <array>
#include <bit>

namespace tokenspeed::kv_flat {
namespace {

// So many lookups of a run wait for memory at the same time.
constexpr std::size_t kBatch = 32;

}  // namespace

PrefixIndex::PrefixIndex(std::uint32_t num_blocks)
    : keys_(num_blocks),
      groups_(num_blocks, kNoGroup),
      slots_(std::bit_ceil(std::size_t{num_blocks} * 2)),  // load at most one half: probes stay short
      mask_(static_cast<std::uint32_t>(slots_.size() - 1)) {}

BlockId PrefixIndex::find(const Digest& key, GroupId group) const noexcept {
    auto [at, tag] = probe(key, group);
    while (true) {
        const BlockId block = next_candidate(at, tag);
        if (block == kNullBlock || keys_[block].key == key) return block;
        at = (at + 1) & mask_;
    }
}

void PrefixIndex::find_run(std::span<const Digest> keys, std::size_t first, std::size_t stride, std::size_t count,
                           GroupId group, std::vector<BlockId>& blocks) const {
    const std::size_t begin = blocks.size();
    blocks.resize(begin + count);
    BlockId* const out = blocks.data() + begin;
    std::size_t num_found = 0;
    const auto key_at = [&](std::size_t index) -> const Digest& { return keys[first + index * stride]; };

    // Blocks of a sequence were mostly taken one behind the other: where the last two lie, the next one lies as well.
    const auto extend_by_guess = [&] {
        if (num_found < 2) return;
        BlockId last = out[num_found - 1];
        const BlockId step = last - out[num_found - 2];
        while (num_found < count) {
            const BlockId next = last + step;
            if (next >= keys_.size() || groups_[next] != group || keys_[next].key != key_at(num_found)) return;
            out[num_found++] = last = next;
        }
    };
    std::array<Probe, kBatch> probes;
    std::array<BlockId, kBatch> candidates;
    const auto extend_by_batch = [&](std::size_t end) {
        const std::size_t size = end - num_found;
        for (std::size_t i = 0; i < size; ++i) {
            probes[i] = probe(key_at(num_found + i), group);
            __builtin_prefetch(&slots_[probes[i].home]);
        }
        for (std::size_t i = 0; i < size; ++i) {
            candidates[i] = next_candidate(probes[i].home, probes[i].tag);
            __builtin_prefetch(&keys_[candidates[i]]);
        }
        for (std::size_t i = 0; i < size; ++i) {
            const Digest& key = key_at(num_found);
            const bool is_found = candidates[i] != kNullBlock && keys_[candidates[i]].key == key;
            const BlockId block = is_found ? candidates[i] : find(key, group);
            if (block == kNullBlock) return;
            out[num_found++] = block;
        }
    };
    for (std::size_t end = 0; num_found == end && end < count;) {
        extend_by_guess();
        end = std::min(count, num_found + kBatch);
        extend_by_batch(end);
    }
    blocks.resize(begin + num_found);
}

bool PrefixIndex::insert(const Digest& key, GroupId group, BlockId block) noexcept {
    if (find(key, group) != kNullBlock) return false;
    auto [at, tag] = probe(key, group);
    while (slots_[at].block != kNullBlock) at = (at + 1) & mask_;
    slots_[at] = {block, tag};
    keys_[block].key = key;
    groups_[block] = static_cast<std::uint8_t>(group);
    ++size_;
    return true;
}

void PrefixIndex::erase(BlockId block) noexcept {
    std::uint32_t hole = probe(key(block), group(block)).home;
    while (slots_[hole].block != block) hole = (hole + 1) & mask_;
    // Close the hole: move back every later slot of the run that may stand there, so that no probe ends too early.
    for (std::uint32_t i = (hole + 1) & mask_; slots_[i].block != kNullBlock; i = (i + 1) & mask_) {
        const std::uint32_t wanted = probe(key(slots_[i].block), group(slots_[i].block)).home;
        if (((i - wanted) & mask_) < ((i - hole) & mask_)) continue;
        slots_[hole] = slots_[i];
        hole = i;
    }
    slots_[hole] = {};
    groups_[block] = kNoGroup;
    --size_;
}

void PrefixIndex::clear() noexcept {
    std::ranges::fill(slots_, Slot{});
    std::ranges::fill(groups_, kNoGroup);
    size_ = 0;
}

double PrefixIndex::bytes_per_block() const noexcept {
    const auto bytes = keys_.size() * (sizeof(KeyLine) + sizeof(groups_[0])) + slots_.size() * sizeof(Slot);
    return static_cast<double>(bytes) / static_cast<double>(keys_.size());
}

}  // namespace tokenspeed::kv_flat
