// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/evicted_keys.h"

#include <algorithm>
#include <bit>

namespace tokenspeed::kv_flat {

EvictedKeys::EvictedKeys(std::uint32_t num_blocks)
    : num_blocks_(num_blocks), tags_(std::bit_ceil(std::size_t{num_blocks} * 2)) {}

EvictedKeys::Mark EvictedKeys::mark_of(const Digest& key, GroupId group) const noexcept {
    const std::uint64_t bits = key.leading_bits() + std::uint64_t{group} * 0x9E3779B97F4A7C15ULL;
    const auto tag = static_cast<std::uint32_t>(bits >> 32U);
    return {static_cast<std::size_t>(bits) & (tags_.size() - 1), tag != 0 ? tag : 1};
}

void EvictedKeys::add(const Digest& key, GroupId group) noexcept {
    const Mark mark = mark_of(key, group);
    tags_[mark.slot] = mark.tag;
}

bool EvictedKeys::contains(const Digest& key, GroupId group) const noexcept {
    const Mark mark = mark_of(key, group);
    return tags_[mark.slot] == mark.tag;
}

void EvictedKeys::clear() noexcept { std::ranges::fill(tags_, 0U); }

double EvictedKeys::bytes_per_block() const noexcept {
    return static_cast<double>(tags_.size() * sizeof(tags_[0])) / static_cast<double>(num_blocks_);
}

}  // namespace tokenspeed::kv_flat
