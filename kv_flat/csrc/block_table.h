// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kv_flat/csrc/block_pool.h"

namespace tokenspeed::kv_flat {

/// The blocks of one sequence in one group, in token order. Owns a share of each; entries without KV are the null
/// block. Append-only for its reader: a column, once handed to a worker, changes only from a block to the null block.
class BlockTable {
  public:
    explicit BlockTable(BlockPool& pool) noexcept : pool_(&pool) {}
    BlockTable(BlockTable&& other) noexcept
        : pool_(other.pool_), blocks_(std::move(other.blocks_)), num_held_(std::exchange(other.num_held_, 0)) {
        other.blocks_.clear();
    }
    BlockTable& operator=(BlockTable&& other) noexcept {
        if (this != &other) {
            release_all();
            pool_ = other.pool_;
            blocks_ = std::exchange(other.blocks_, {});
            num_held_ = std::exchange(other.num_held_, 0);
        }
        return *this;
    }
    BlockTable(const BlockTable&) = delete;
    BlockTable& operator=(const BlockTable&) = delete;
    ~BlockTable() { release_all(); }

    [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(blocks_.size()); }
    [[nodiscard]] std::span<const BlockId> ids() const noexcept { return blocks_; }

    /// Blocks really held (null entries are not).
    [[nodiscard]] std::uint32_t num_held() const noexcept { return num_held_; }

    void append(BlockRef&& block) {
        blocks_.push_back(block.id());
        static_cast<void>(block.surrender());
        ++num_held_;
    }
    void append_null() { blocks_.push_back(kNullBlock); }

    /// Puts another block into column `index`, which no worker has been told of yet; returns the one that stood there.
    [[nodiscard]] BlockRef replace(std::uint32_t index, BlockRef&& block) {
        return {*pool_, std::exchange(blocks_[index], block.surrender())};
    }

    /// Gives back column `index`; it reads as the null block from now on.
    void retire(std::uint32_t index) noexcept {
        const BlockId block = std::exchange(blocks_[index], kNullBlock);
        if (block == kNullBlock) return;
        pool_->release(block);
        --num_held_;
    }

  private:
    // Tail before head: the head of a prefix is what others most likely share, so it should be evicted last.
    void release_all() noexcept {
        for (auto block = blocks_.rbegin(); block != blocks_.rend(); ++block) {
            if (*block != kNullBlock) pool_->release(*block);
        }
        blocks_.clear();
        num_held_ = 0;
    }

    BlockPool* pool_;
    std::vector<BlockId> blocks_;
    std::uint32_t num_held_ = 0;
};

}  // namespace tokenspeed::kv_flat
