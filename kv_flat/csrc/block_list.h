// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "kv_flat/csrc/prefix_index.h"

namespace tokenspeed::kv_flat {

/// Neighbours of every block in the one list that it stands in.
struct BlockLink {
    BlockId previous = kNullBlock;
    BlockId next = kNullBlock;
};
using BlockLinks = std::vector<BlockLink>;

/// A list of blocks, threaded through links that many lists share: a block stands in at most one of them.
class BlockList {
  public:
    [[nodiscard]] bool empty() const noexcept { return front_ == kNullBlock; }
    [[nodiscard]] BlockId front() const noexcept { return front_; }
    [[nodiscard]] std::uint32_t size() const noexcept { return size_; }

    void push_back(BlockLinks& links, BlockId block) noexcept {
        links[block] = {back_, kNullBlock};
        (back_ == kNullBlock ? front_ : links[back_].next) = block;
        back_ = block;
        ++size_;
    }
    void push_front(BlockLinks& links, BlockId block) noexcept {
        links[block] = {kNullBlock, front_};
        (front_ == kNullBlock ? back_ : links[front_].previous) = block;
        front_ = block;
        ++size_;
    }
    /// @pre the block stands in this list
    void erase(BlockLinks& links, BlockId block) noexcept {
        const BlockLink link = links[block];
        (link.previous == kNullBlock ? front_ : links[link.previous].next) = link.next;
        (link.next == kNullBlock ? back_ : links[link.next].previous) = link.previous;
        --size_;
    }

    /// Appends the blocks, front to back. Stops after `most`, so that a broken list ends.
    void append_to(std::vector<BlockId>& order, const BlockLinks& links, std::size_t most) const {
        for (BlockId block = front_; block != kNullBlock && order.size() < most; block = links[block].next)
            order.push_back(block);
    }

  private:
    BlockId front_ = kNullBlock;
    BlockId back_ = kNullBlock;
    std::uint32_t size_ = 0;
};

}  // namespace tokenspeed::kv_flat
