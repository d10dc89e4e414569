// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "kv_flat/csrc/prefix_index.h"

namespace tokenspeed::kv_flat {

/// Remembers about as many of the last evicted keys as the pool has blocks, by 32 bits each: enough to say how much of
/// a miss a larger pool or a better policy would have served. A newer key may push out an older one.
class EvictedKeys {
  public:
    /// @param num_blocks size of the pool, the null block included
    explicit EvictedKeys(std::uint32_t num_blocks);

    void add(const Digest& key, GroupId group) noexcept;
    /// May be wrong once in some four billion times.
    [[nodiscard]] bool contains(const Digest& key, GroupId group) const noexcept;
    void clear() noexcept;

    [[nodiscard]] double bytes_per_block() const noexcept;

  private:
    struct Mark {
        std::size_t slot;
        std::uint32_t tag;
    };
    [[nodiscard]] Mark mark_of(const Digest& key, GroupId group) const noexcept;

    std::uint32_t num_blocks_;
    std::vector<std::uint32_t> tags_;  // 0: empty
};

}  // namespace tokenspeed::kv_flat
