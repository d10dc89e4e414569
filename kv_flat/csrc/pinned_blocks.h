// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kv_flat/csrc/block_pool.h"

namespace tokenspeed::kv_flat {

/// Shares of blocks that somebody outside holds, beside the sequences: a pinned block is neither handed out nor
/// evicted.
class PinnedBlocks {
  public:
    /// One more share of each block. Throws std::invalid_argument, with no change, for a block that cannot be owned.
    void pin(BlockPool& pool, std::span<const BlockId> blocks) {
        for (const BlockId block : blocks) {
            if (block == kNullBlock || block > pool.num_usable()) {
                throw std::invalid_argument("block " + std::to_string(block) +
                                            " cannot be pinned; blocks are from 1 to " +
                                            std::to_string(pool.num_usable()));
            }
        }
        for (const BlockId block : blocks) shares_.emplace(block, pool.share(block));
    }

    /// Gives one share of each block back, in this order. Throws std::invalid_argument for a block without one.
    void unpin(std::span<const BlockId> blocks) {
        for (const BlockId block : blocks) {
            const auto share = shares_.find(block);
            if (share == shares_.end())
                throw std::invalid_argument("block " + std::to_string(block) + " is not pinned");
            shares_.erase(share);
        }
    }

    [[nodiscard]] std::size_t size() const noexcept { return shares_.size(); }

    /// Adds the shares to `owners`, which is indexed by block.
    void count_owners(std::vector<std::uint32_t>& owners) const {
        for (const auto& [block, share] : shares_) owners[block] += 1;
    }

  private:
    std::multimap<BlockId, BlockRef> shares_;
};

}  // namespace tokenspeed::kv_flat
