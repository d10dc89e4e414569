// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
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

    /// Has the caches fetch its tables.
    void fetch() const noexcept { __builtin_prefetch(columns_.data()); }

    /// Whether a table grew, or is new, since the last call. Where none did, take_news has nothing to tell.
    [[nodiscard]] bool take_growth() noexcept { return std::exchange(has_grown_, false); }

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
    [[nodiscard]] std::vector<BlockCopy> take_copies() noexcept {
        std::vector<BlockCopy> taken;
        if (copies_) taken.swap(*copies_);
        copies_.reset();
        return taken;
    }
    [[nodiscard]] std::span<const BlockCopy> copies() const noexcept {
        return copies_ ? std::span<const BlockCopy>(*copies_) : std::span<const BlockCopy>();
    }

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

    void add_copy(BlockCopy&& copy) {
        if (!copies_) copies_ = std::make_unique<std::vector<BlockCopy>>();
        copies_->push_back(std::move(copy));
    }

    // Up to these two lengths a step has nothing to look up in the tables, which lie elsewhere in memory.
    std::uint32_t covered_tokens_ = 0;  // every table has blocks for so many; 0 when a group keeps states
    std::uint32_t settled_tokens_ = 0;  // shorter lengths complete no logical block that is not published yet
    bool has_grown_ = true;
    std::vector<Column> columns_;
    std::unique_ptr<std::vector<BlockCopy>> copies_;  // most sequences never have one
};

}  // namespace tokenspeed::kv_flat
