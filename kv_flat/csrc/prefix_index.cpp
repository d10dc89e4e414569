// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/prefix_index.h"

#include <algorithm>
#include <bit>

namespace tokenspeed::kv_flat {

PrefixIndex::PrefixIndex(std::uint32_t num_blocks)
    : entries_(num_blocks),
      slots_(std::bit_ceil(std::size_t{num_blocks} * 2)),  // load at most one half: probes stay short
      mask_(static_cast<std::uint32_t>(slots_.size() - 1)) {}

std::uint64_t PrefixIndex::hash(const Digest& key, GroupId group) noexcept {
    return key.leading_bits() ^ (std::uint64_t{group} * 0x9E3779B97F4A7C15ULL);
}

std::uint32_t PrefixIndex::home(std::uint64_t hash_value) const noexcept {
    return static_cast<std::uint32_t>(hash_value) & mask_;
}

BlockId PrefixIndex::find(const Digest& key, GroupId group) const noexcept {
    const std::uint64_t wanted = hash(key, group);
    const auto tag = static_cast<std::uint32_t>(wanted >> 32U);
    for (std::uint32_t i = home(wanted);; i = (i + 1) & mask_) {
        const Slot& slot = slots_[i];
        if (slot.block == kNullBlock) return kNullBlock;
        if (slot.tag != tag) continue;
        const Entry& entry = entries_[slot.block];
        if (entry.group == group && entry.key == key) return slot.block;
    }
}

bool PrefixIndex::insert(const Digest& key, GroupId group, BlockId block) noexcept {
    if (find(key, group) != kNullBlock) return false;
    const std::uint64_t value = hash(key, group);
    std::uint32_t i = home(value);
    while (slots_[i].block != kNullBlock) i = (i + 1) & mask_;
    slots_[i] = {block, static_cast<std::uint32_t>(value >> 32U)};
    entries_[block] = {key, group};
    ++size_;
    return true;
}

void PrefixIndex::erase(BlockId block) noexcept {
    std::uint32_t hole = home(hash(entries_[block].key, entries_[block].group));
    while (slots_[hole].block != block) hole = (hole + 1) & mask_;
    // Close the hole: move back every later slot of the run that may stand there, so that no probe ends too early.
    for (std::uint32_t i = (hole + 1) & mask_; slots_[i].block != kNullBlock; i = (i + 1) & mask_) {
        const Entry& entry = entries_[slots_[i].block];
        const std::uint32_t wanted = home(hash(entry.key, entry.group));
        if (((i - wanted) & mask_) < ((i - hole) & mask_)) continue;
        slots_[hole] = slots_[i];
        hole = i;
    }
    slots_[hole] = {};
    entries_[block].group = kNoGroup;
    --size_;
}

void PrefixIndex::clear() noexcept {
    std::ranges::fill(slots_, Slot{});
    for (Entry& entry : entries_) entry.group = kNoGroup;
    size_ = 0;
}

double PrefixIndex::bytes_per_block() const noexcept {
    const auto bytes = entries_.size() * sizeof(Entry) + slots_.size() * sizeof(Slot);
    return static_cast<double>(bytes) / static_cast<double>(entries_.size());
}

}  // namespace tokenspeed::kv_flat
