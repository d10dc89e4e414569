// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
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

    /// Makes `block` findable. False, and no change, when another block already holds that key.
    /// @pre block has no key
    bool insert(const Digest& key, GroupId group, BlockId block) noexcept;

    /// @pre block has a key
    void erase(BlockId block) noexcept;

    void clear() noexcept;

    [[nodiscard]] bool has_key(BlockId block) const noexcept { return entries_[block].group != kNoGroup; }
    [[nodiscard]] const Digest& key(BlockId block) const noexcept { return entries_[block].key; }
    [[nodiscard]] GroupId group(BlockId block) const noexcept { return entries_[block].group; }
    [[nodiscard]] std::uint32_t size() const noexcept { return size_; }

    /// Bytes of this index per block of the pool.
    [[nodiscard]] double bytes_per_block() const noexcept;

  private:
    static constexpr GroupId kNoGroup = ~GroupId{0};

    struct Entry {
        Digest key;
        GroupId group = kNoGroup;
    };
    struct Slot {
        BlockId block = kNullBlock;
        std::uint32_t tag = 0;  // high half of the hash: spares most reads of `entries_`
    };

    [[nodiscard]] static std::uint64_t hash(const Digest& key, GroupId group) noexcept;
    [[nodiscard]] std::uint32_t home(std::uint64_t hash_value) const noexcept;

    std::vector<Entry> entries_;  // by block
    std::vector<Slot> slots_;
    std::uint32_t mask_;
    std::uint32_t size_ = 0;
};

}  // namespace tokenspeed::kv_flat
