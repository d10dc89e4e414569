// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv_flat/csrc/block_key.h"

namespace tokenspeed::kv_flat {

/// Marks of a prompt's content, one per logical block: equal for equal tokens from the start, whatever salt or adapter
/// the keys name. Only for counting; 32 bits each.
[[nodiscard]] std::vector<std::uint32_t> content_marks(std::span<const TokenId> tokens, std::uint32_t key_tokens);

/// Remembers under which root (salt and adapter) content was computed last, for about as many logical blocks as the
/// pool has. Tells how much of a prompt is computed again only because somebody else computed it. Empty until the first
/// mark is noted.
class IsolationWatch {
  public:
    /// @param num_keys logical blocks of the pool
    explicit IsolationWatch(std::uint32_t num_keys) noexcept : num_keys_(num_keys) {}

    /// Notes a prompt that is computed under `root`.
    /// @param first logical blocks that need no computing
    /// @returns logical blocks in a row, from `first` on, that were last computed under another root
    std::uint32_t note(std::span<const std::uint32_t> marks, const Digest& root, std::size_t first);

    /// Nothing is cached any more.
    void clear() noexcept { entries_.clear(); }

  private:
    struct Entry {
        std::uint32_t mark = 0;
        std::uint32_t owner = 0;  ///< of the root; 0: empty
    };
    std::uint32_t num_keys_;
    std::vector<Entry> entries_;
};

}  // namespace tokenspeed::kv_flat
