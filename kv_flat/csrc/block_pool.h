// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kv_flat/csrc/block_list.h"
#include "kv_flat/csrc/block_residency.h"
#include "kv_flat/csrc/evicted_keys.h"
#include "kv_flat/csrc/eviction_policy.h"
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
/// `take` serves blank blocks first, then cached ones in the order of the eviction policy.
class BlockPool {
  public:
    /// @param num_blocks all blocks, the null block included; at least 2
    /// @param most_units logical blocks in a block, at most: each has a key of its own
    BlockPool(std::uint32_t num_blocks, bool record_events, std::uint32_t most_units = 1,
              const EvictionSpec& eviction = {});
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

    /// What was shared since the last call went to one sequence of this session (0: not known).
    void settle(std::uint64_t session) noexcept { policy_->settle(session); }

    /// Until it ends, every block that is released comes from one sequence.
    class [[nodiscard]] Run {
      public:
        Run(const Run&) = delete;
        Run& operator=(const Run&) = delete;
        ~Run() { policy_.close_run(); }

      private:
        friend class BlockPool;
        Run(EvictionPolicy& policy, const Departure& departure) : policy_(policy) { policy_.open_run(departure); }
        EvictionPolicy& policy_;
    };
    Run open_run(const Departure& departure) { return {*policy_, departure}; }

    /// Tells the eviction policy the time, in seconds from any start.
    void set_time(double now_s) noexcept { policy_->set_time(now_s); }

    /// The block that holds `key` in `group`, or kNullBlock.
    [[nodiscard]] BlockId find(const Digest& key, GroupId group) const noexcept {
        return index_.find(key, group) >> unit_shift_;
    }

    /// Appends the blocks that hold `keys[first]`, `keys[first + stride]`, ..., up to the first that is not there.
    void find_run(std::span<const Digest> keys, std::size_t first, std::size_t stride, std::size_t count, GroupId group,
                  std::vector<BlockId>& blocks) const;

    /// Whether the key was cached and, as far as is remembered, evicted.
    [[nodiscard]] bool was_evicted(const Digest& key, GroupId group) const noexcept {
        return evicted_keys_.contains(key, group);
    }

    /// Makes logical block `unit` of a block hittable. False when it has a key already or another one holds the same
    /// content.
    bool publish(BlockId block, const Digest& key, GroupId group, std::uint32_t unit = 0) noexcept;

    /// Whether logical block `unit` of `block`, or one behind it, can be hit.
    [[nodiscard]] bool has_key_from(BlockId block, std::uint32_t unit) const noexcept;

    /// Makes a block unhittable: what it holds is not what its key says. Nothing happens when it has no key.
    void unpublish(BlockId block) noexcept;

    [[nodiscard]] bool is_published(BlockId block) const noexcept { return has_key(block); }

    [[nodiscard]] std::uint32_t num_owners(BlockId block) const noexcept { return owners_[block]; }

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
    [[nodiscard]] std::uint64_t num_evictions() const noexcept;
    [[nodiscard]] const CountsByKind& num_evictions_by_kind() const noexcept { return num_evictions_; }
    /// Cached blocks by the kind that they would count as if they were evicted now.
    [[nodiscard]] CountsByKind num_idle_blocks() const { return policy_->num_blocks(); }
    /// Where cached blocks that nobody owns stand. O(pool): for pictures.
    [[nodiscard]] std::vector<IdleBlock> idle_blocks() const { return policy_->idle_blocks(); }
    /// Logical blocks of `block` that can be hit.
    [[nodiscard]] std::uint32_t num_keys(BlockId block) const noexcept { return num_keys_[block]; }
    /// The first key of `block`. @pre is_published(block)
    [[nodiscard]] const Digest& first_key(BlockId block) const noexcept;
    [[nodiscard]] std::uint32_t num_blank() const noexcept { return blank_.size(); }

    /// Bytes of bookkeeping per block of the pool.
    [[nodiscard]] double bytes_per_block() const noexcept;

    /// Grows whenever a block becomes free: a cheap "has anything changed since I failed?".
    [[nodiscard]] std::uint64_t num_releases() const noexcept { return num_releases_; }

    /// Free blocks in the order in which `take` would serve them. For tests and diagnosis: O(pool).
    [[nodiscard]] std::vector<BlockId> free_order() const;

    /// Throws std::logic_error naming the first broken invariant. `owners[b]` is how many tables hold block b.
    void check_integrity(const std::vector<std::uint32_t>& owners) const;

  private:
    friend class BlockRef;
    friend class BlockTable;

    void release(BlockId block) noexcept;
    void forget(BlockId block) noexcept;
    [[nodiscard]] bool has_key(BlockId block) const noexcept { return num_keys_[block] > 0; }
    [[nodiscard]] std::uint32_t entry(BlockId block, std::uint32_t unit) const noexcept {
        return (block << unit_shift_) | unit;
    }

    void make_blank(BlockId block) noexcept;
    void evict(const Victim& victim) noexcept;
    void check_owners(const std::vector<std::uint32_t>& owners, const std::vector<bool>& queued) const;

    std::vector<std::uint32_t> owners_;  // by block
    BlockLinks links_;                   // by block: of the blank list, or of the policy's lists
    BlockList blank_;
    std::unique_ptr<EvictionPolicy> policy_;
    std::uint32_t most_units_;
    std::uint32_t unit_shift_;
    PrefixIndex index_;  // over logical blocks, numbered by `entry`
    std::vector<std::uint16_t> num_keys_;
    EvictedKeys evicted_keys_;
    KvEventLog events_;
    std::unique_ptr<BlockResidency> residency_;  // null: nobody asked
    std::uint32_t num_usable_;
    std::uint32_t num_free_ = 0;
    CountsByKind num_evictions_{};
    std::uint64_t num_releases_ = 0;
};

}  // namespace tokenspeed::kv_flat
