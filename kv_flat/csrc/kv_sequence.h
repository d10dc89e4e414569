// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "kv_flat/csrc/block_table.h"

namespace tokenspeed::kv_flat {

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

    /// Leading columns that a worker already knows; the rest is news, and counts as told from now on.
    [[nodiscard]] std::uint32_t take_news(GroupId group) noexcept {
        return std::exchange(columns_[group].num_told, columns_[group].table.size());
    }

  private:
    friend class FlatKv;

    struct Column {
        BlockTable table;
        std::uint32_t num_published = 0;  // leading blocks already offered to the index
        std::uint32_t num_retired = 0;    // leading blocks given back because no window reaches them
        std::uint32_t num_told = 0;       // leading blocks that take_news has handed out
    };

    KvSequence() = default;

    std::vector<Column> columns_;
};

}  // namespace tokenspeed::kv_flat
