// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kv_flat/csrc/block_table.h"

namespace tokenspeed::kv_flat {

/// A block to be copied before a step runs. Owns both ends, so that they are still there when the copy runs.
struct BlockCopy {
    GroupId group = 0;
    BlockRef source;
    std::optional<BlockRef> target = std::nullopt;
};

/// The KV of one token sequence: a table per group. Move-only; its end gives every block back.
class [[nodiscard]] KvSequence {
  public:
    [[nodiscard]] const BlockTable& table(GroupId group) const noexcept { return columns_[group].table; }
    [[nodiscard]] std::uint32_t num_groups() const noexcept { return static_cast<std::uint32_t>(columns_.size()); }
    [[nodiscard]] std::uint32_t num_held_blocks() const noexcept {
        std::uint32_t sum = 0;
        for (const Column& column : columns_) sum += column.table.num_held();
        return sum;
    }

    /// Has the caches fetch what a step reads of it.
    void fetch() const noexcept { __builtin_prefetch(columns_.data()); }

    /// Leading columns that a worker already knows; the rest is news, and counts as told from now on.
    [[nodiscard]] std::uint32_t take_news(GroupId group) noexcept {
        return std::exchange(columns_[group].num_told, columns_[group].table.size());
    }

    /// Leading columns that hold valid KV from the cache (some only in their first tokens): never to be zeroed.
    [[nodiscard]] std::uint32_t num_warm_blocks(GroupId group) const noexcept { return columns_[group].num_warm; }

    /// Whether its last step left states that may become hittable.
    [[nodiscard]] bool has_checkpoint() const noexcept {
        for (const Column& column : columns_) {
            if (column.checkpoint_tokens > 0) return true;
        }
        return false;
    }

    /// Copies that must run before the next step that computes this sequence.
    [[nodiscard]] std::vector<BlockCopy> take_copies() noexcept { return std::exchange(copies_, {}); }
    [[nodiscard]] std::span<const BlockCopy> copies() const noexcept { return copies_; }

  private:
    friend class FlatKv;

    struct Column {
        BlockTable table;
        std::uint32_t num_warm = 0;       // leading blocks that the cache gave
        std::uint32_t num_published = 0;  // leading logical blocks already offered to the index
        std::uint32_t num_retired = 0;    // leading blocks given back because no window reaches them
        std::uint32_t num_told = 0;       // leading blocks that take_news has handed out

        // kState: tokens behind which the last column's state may become hittable, 0 when it may not; and whether that
        // is worth a copy when the next step goes on in the same column.
        std::uint32_t checkpoint_tokens = 0;
        bool checkpoint_is_wanted = false;
    };

    KvSequence() = default;

    std::vector<Column> columns_;
    std::vector<BlockCopy> copies_;
};

}  // namespace tokenspeed::kv_flat
