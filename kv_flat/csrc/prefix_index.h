// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv_flat/csrc/digest.h"

namespace tokenspeed::kv_flat {

using BlockId = std::uint32_t;
using GroupId = std::uint32_t;

/// vLLM's null block: it pads tables where no KV is kept, and is never owned, keyed or handed out.
inline constexpr BlockId kNullBlock = 0;

/// (key, group) -> block. Open addressing with linear probing; sized once for the pool, so it never rehashes.
/// A slot holds 8 bytes; the key stays in a table by block, where an eviction needs it anyway.
class PrefixIndex {
  public:
    /// @param num_blocks size of the pool, the null block included
    explicit PrefixIndex(std::uint32_t num_blocks);

    /// The block that holds `key` in `group`, or kNullBlock.
    [[nodiscard]] BlockId find(const Digest& key, GroupId group) const noexcept;

    /// Appends the blocks that hold `keys[first]`, `keys[first + stride]`, ... in `group` to `blocks`, up to the first
    /// that is not there, and `count` at most. Reads ahead: a table of this size does not stay in a processor's cache.
    void find_run(std::span<const Digest> keys, std::size_t first, std::size_t stride, std::size_t count, GroupId group,
                  std::vector<BlockId>& blocks) const;

    /// Makes `block` findable. False, and no change, when another block already holds that key.
    /// @pre block has no key, and group < kMaxGroups
    bool insert(const Digest& key, GroupId group, BlockId block) noexcept;

    /// @pre block has a key
    void erase(BlockId block) noexcept;

    void clear() noexcept;

    [[nodiscard]] bool has_key(BlockId block) const noexcept { return groups_[block] != kNoGroup; }
    [[nodiscard]] const Digest& key(BlockId block) const noexcept { return keys_[block].key; }
    [[nodiscard]] GroupId group(BlockId block) const noexcept { return groups_[block]; }
    [[nodiscard]] std::uint32_t size() const noexcept { return size_; }

    /// Bytes of this index per block of the pool.
    [[nodiscard]] double bytes_per_block() const noexcept;

    /// Groups are numbered below this.
    static constexpr GroupId kMaxGroups = 255;

  private:
    static constexpr std::uint8_t kNoGroup = 255;

    /// Never straddles two cache lines.
    struct alignas(32) KeyLine {
        Digest key;
    };
    struct Slot {
        BlockId block = kNullBlock;
        std::uint32_t tag = 0;  // of the hash's high half, and the group: spares most reads of `keys_`
    };
    /// Where a lookup starts, and what the slot that it looks for says.
    struct Probe {
        std::uint32_t home;
        std::uint32_t tag;
    };

    [[nodiscard]] Probe probe(const Digest& key, GroupId group) const noexcept {
        const std::uint64_t bits = key.leading_bits() ^ (std::uint64_t{group} * 0x9E3779B97F4A7C15ULL);
        return {static_cast<std::uint32_t>(bits) & mask_, static_cast<std::uint32_t>(bits >> 32U & ~0xFFULL) | group};
    }
    /// The block of the first slot from `at` on with that tag; leaves `at` there. kNullBlock when there is none.
    [[nodiscard]] BlockId next_candidate(std::uint32_t& at, std::uint32_t tag) const noexcept {
        while (slots_[at].block != kNullBlock && slots_[at].tag != tag) at = (at + 1) & mask_;
        return slots_[at].block;
    }

    std::vector<KeyLine> keys_;  // by block
    std::vector<std::uint8_t> groups_;
    std::vector<Slot> slots_;
    std::uint32_t mask_;
    std::uint32_t size_ = 0;
};

}  // namespace tokenspeed::kv_flat
