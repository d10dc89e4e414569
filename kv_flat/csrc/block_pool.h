// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kv_flat/csrc/block_residency.h"
#include "kv_flat/csrc/kv_events.h"
#include "kv_flat/csrc/prefix_index.h"

namespace tokenspeed::kv_flat {

class BlockPool;

/// One owner's share of one block. Move-only, so a block is given back exactly once.
class [[nodiscard]] BlockRef {
  public:
    BlockRef(BlockRef&& other) noexcept
        : pool_(std::exchange(other.pool_, nullptr)), block_(std::exchange(other.block_, kNullBlock)) {}
    BlockRef& operator=(BlockRef&& other) noexcept;
    BlockRef(const BlockRef&) = delete;
    BlockRef& operator=(const BlockRef&) = delete;
    ~BlockRef();

    [[nodiscard]] BlockId id() const noexcept { return block_; }

  private:
    friend class BlockPool;
    friend class BlockTable;
    BlockRef(BlockPool& pool, BlockId block) noexcept : pool_(&pool), block_(block) {}
    /// Hands the share over to a table, which gives it back later.
    [[nodiscard]] BlockId surrender() noexcept {
        pool_ = nullptr;
        return std::exchange(block_, kNullBlock);
    }

    BlockPool* pool_;
    BlockId block_;
};

/// All blocks of KV memory, and what each holds.
///
/// A block is in use (it has owners), cached (no owner, but a key: it can be hit or evicted) or blank (neither).
/// Cached and blank blocks stand in one queue; `take` serves from its front. Blank ones stand in front of cached ones,
/// and among the cached ones the least recently released comes first.
class BlockPool {
  public:
    /// @param num_blocks all blocks, the null block included; at least 2
    /// @param most_units logical blocks in a block, at most: each has a key of its own
    BlockPool(std::uint32_t num_blocks, bool record_events, std::uint32_t most_units = 1);
    BlockPool(const BlockPool&) = delete;
    BlockPool& operator=(const BlockPool&) = delete;
    ~BlockPool();

    /// Blocks that can be owned at all (the null block cannot).
    [[nodiscard]] std::uint32_t num_usable() const noexcept { return num_usable_; }
    [[nodiscard]] std::uint32_t num_free() const noexcept { return num_free_; }
    [[nodiscard]] std::uint32_t num_in_use() const noexcept { return num_usable_ - num_free_; }
    /// Logical blocks that can be hit.
    [[nodiscard]] std::uint32_t num_cached() const noexcept { return index_.size(); }

    /// Takes a free block; what it cached is forgotten.
    /// @pre num_free() > 0
    BlockRef take();

    /// Becomes one more owner of a block that is in use or cached.
    BlockRef share(BlockId block);

    /// The block that holds `key` in `group`, or kNullBlock.
    [[nodiscard]] BlockId find(const Digest& key, GroupId group) const noexcept {
        return index_.find(key, group) >> unit_shift_;
    }

    /// Makes logical block `unit` of a block hittable. False when it has a key already or another one holds the same
    /// content.
    bool publish(BlockId block, const Digest& key, GroupId group, std::uint32_t unit = 0) noexcept;

    /// Whether logical block `unit` of `block`, or one behind it, can be hit.
    [[nodiscard]] bool has_key_from(BlockId block, std::uint32_t unit) const noexcept;

    /// Makes a block unhittable: what it holds is not what its key says. Nothing happens when it has no key.
    void unpublish(BlockId block) noexcept;

    [[nodiscard]] bool is_published(BlockId block) const noexcept { return has_key(block); }

    [[nodiscard]] std::uint32_t num_owners(BlockId block) const noexcept { return blocks_[block].owners; }

    /// Forgets all cached content. False, and no change, while a block is in use.
    bool clear_cache();

    /// Forgets the content of blocks nobody owns and makes blocks in use unhittable.
    void forget_keys() noexcept;

    /// From now on, follows the lives of a share of the blocks.
    void follow_blocks(double sample_rate) { residency_ = std::make_unique<BlockResidency>(sample_rate); }
    /// Lives of followed blocks that ended since the last call.
    [[nodiscard]] std::vector<BlockLife> drain_lives() {
        return residency_ ? residency_->drain() : std::vector<BlockLife>();
    }

    [[nodiscard]] KvEventLog& events() noexcept { return events_; }
    [[nodiscard]] std::uint64_t num_evictions() const noexcept { return num_evictions_; }

    /// Grows whenever a block becomes free: a cheap "has anything changed since I failed?".
    [[nodiscard]] std::uint64_t num_releases() const noexcept { return num_releases_; }

    /// Free blocks in the order in which `take` would serve them. For tests and diagnosis: O(pool).
    [[nodiscard]] std::vector<BlockId> free_order() const;

    /// Throws std::logic_error naming the first broken invariant. `owners[b]` is how many tables hold block b.
    void check_integrity(const std::vector<std::uint32_t>& owners) const;

  private:
    friend class BlockRef;
    friend class BlockTable;

    struct Block {
        std::uint32_t owners = 0;
        BlockId previous = kNullBlock;  // neighbours in the free queue; the null block is its head
        BlockId next = kNullBlock;
    };

    void release(BlockId block) noexcept;
    void unlink(BlockId block) noexcept;
    void link_before(BlockId block, BlockId successor) noexcept;
    void forget(BlockId block) noexcept;
    [[nodiscard]] bool has_key(BlockId block) const noexcept { return num_keys_[block] > 0; }
    [[nodiscard]] std::uint32_t entry(BlockId block, std::uint32_t unit) const noexcept {
        return (block << unit_shift_) | unit;
    }

    std::vector<Block> blocks_;
    std::uint32_t most_units_;
    std::uint32_t unit_shift_;
    PrefixIndex index_;  // over logical blocks, numbered by `entry`
    std::vector<std::uint16_t> num_keys_;
    KvEventLog events_;
    std::unique_ptr<BlockResidency> residency_;  // null: nobody asked
    std::uint32_t num_usable_;
    std::uint32_t num_free_ = 0;
    std::uint64_t num_evictions_ = 0;
    std::uint64_t num_releases_ = 0;
};

}  // namespace tokenspeed::kv_flat
