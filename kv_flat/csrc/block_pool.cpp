// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/block_pool.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace tokenspeed::kv_flat {

BlockRef& BlockRef::operator=(BlockRef&& other) noexcept {
    if (this != &other) {
        if (pool_ != nullptr) pool_->release(block_);
        pool_ = std::exchange(other.pool_, nullptr);
        block_ = std::exchange(other.block_, kNullBlock);
    }
    return *this;
}

BlockRef::~BlockRef() {
    if (pool_ != nullptr) pool_->release(block_);
}

BlockPool::BlockPool(std::uint32_t num_blocks, bool record_events, std::uint32_t most_units)
    : blocks_(num_blocks),
      most_units_(most_units),
      unit_shift_(static_cast<std::uint32_t>(std::bit_width(most_units - 1))),
      index_(num_blocks << unit_shift_),
      num_keys_(num_blocks),
      events_(record_events),
      num_usable_(num_blocks - 1) {
    if (num_blocks < 2) {
        throw std::invalid_argument("num_blocks is " + std::to_string(num_blocks) +
                                    "; a pool needs at least 2 (the null block and one for use)");
    }
    for (BlockId block = 1; block < num_blocks; ++block) {
        link_before(block, kNullBlock);
        ++num_free_;
    }
}

BlockPool::~BlockPool() {
    if (num_in_use() == 0) return;
    std::fprintf(stderr, "BlockPool destroyed while %u blocks are owned\n", num_in_use());
    std::abort();
}

BlockRef BlockPool::take() {
    const BlockId block = blocks_[kNullBlock].next;
    unlink(block);
    --num_free_;
    if (has_key(block)) {
        ++num_evictions_;
        forget(block);
    }
    if (residency_) residency_->note_taken(block);
    blocks_[block].owners = 1;
    return {*this, block};
}

BlockRef BlockPool::share(BlockId block) {
    if (blocks_[block].owners++ == 0) {
        unlink(block);
        --num_free_;
    }
    if (residency_) residency_->note_hit(block);
    return {*this, block};
}

bool BlockPool::publish(BlockId block, const Digest& key, GroupId group, std::uint32_t unit) noexcept {
    if (index_.has_key(entry(block, unit)) || !index_.insert(key, group, entry(block, unit))) return false;
    ++num_keys_[block];
    return true;
}

bool BlockPool::has_key_from(BlockId block, std::uint32_t unit) const noexcept {
    for (; unit < most_units_; ++unit) {
        if (index_.has_key(entry(block, unit))) return true;
    }
    return false;
}

void BlockPool::unpublish(BlockId block) noexcept {
    if (has_key(block)) forget(block);
}

bool BlockPool::clear_cache() {
    if (num_in_use() > 0) return false;
    forget_keys();
    return true;
}

void BlockPool::forget_keys() noexcept {
    index_.clear();
    std::ranges::fill(num_keys_, std::uint16_t{0});
    events_.record({});
    if (residency_) residency_->forget_all();
}

void BlockPool::release(BlockId block) noexcept {
    if (--blocks_[block].owners > 0) return;
    // A blank block is used up before anything cached is evicted.
    link_before(block, has_key(block) ? kNullBlock : blocks_[kNullBlock].next);
    ++num_free_;
    ++num_releases_;
}

void BlockPool::forget(BlockId block) noexcept {
    // Tail first: what is told as removed is never the parent of what is still told as stored.
    for (std::uint32_t unit = most_units_; num_keys_[block] > 0; --unit) {
        const std::uint32_t keyed = entry(block, unit - 1);
        if (!index_.has_key(keyed)) continue;
        if (events_.enabled()) {
            KvEvent removed;
            removed.kind = KvEvent::Kind::kRemoved;
            removed.group = index_.group(keyed);
            removed.key = index_.key(keyed);
            events_.record(std::move(removed));
        }
        index_.erase(keyed);
        --num_keys_[block];
    }
}

void BlockPool::unlink(BlockId block) noexcept {
    const Block& entry = blocks_[block];
    blocks_[entry.previous].next = entry.next;
    blocks_[entry.next].previous = entry.previous;
}

void BlockPool::link_before(BlockId block, BlockId successor) noexcept {
    const BlockId predecessor = blocks_[successor].previous;
    blocks_[block].previous = predecessor;
    blocks_[block].next = successor;
    blocks_[predecessor].next = block;
    blocks_[successor].previous = block;
}

std::vector<BlockId> BlockPool::free_order() const {
    std::vector<BlockId> order;
    order.reserve(num_free_);
    for (BlockId block = blocks_[kNullBlock].next; block != kNullBlock; block = blocks_[block].next)
        order.push_back(block);
    return order;
}

void BlockPool::check_integrity(const std::vector<std::uint32_t>& owners) const {
    const auto fail = [](const std::string& what) { throw std::logic_error("block pool: " + what); };
    std::vector<bool> queued(blocks_.size());
    std::uint32_t num_queued = 0;
    for (BlockId block = blocks_[kNullBlock].next; block != kNullBlock; block = blocks_[block].next) {
        if (queued[block]) fail("block " + std::to_string(block) + " stands twice in the free queue");
        queued[block] = true;
        if (++num_queued > num_usable_) fail("the free queue is longer than the pool");
    }
    if (num_queued != num_free_) {
        fail("free queue holds " + std::to_string(num_queued) + " blocks, count says " + std::to_string(num_free_));
    }
    std::uint32_t num_keyed = 0;
    for (BlockId block = 1; block < blocks_.size(); ++block) {
        const std::uint32_t counted = blocks_[block].owners;
        if (counted != owners[block]) {
            fail("block " + std::to_string(block) + " counts " + std::to_string(counted) + " owners, has " +
                 std::to_string(owners[block]));
        }
        if ((counted == 0) != queued[block])
            fail("block " + std::to_string(block) + " is both free and in use, or neither");
        std::uint32_t num_keys = 0;
        for (std::uint32_t unit = 0; unit < most_units_; ++unit) {
            const std::uint32_t keyed = entry(block, unit);
            if (!index_.has_key(keyed)) continue;
            ++num_keys;
            if (index_.find(index_.key(keyed), index_.group(keyed)) != keyed)
                fail("block " + std::to_string(block) + " has a key that does not lead to it");
        }
        if (num_keys != num_keys_[block]) fail("block " + std::to_string(block) + " miscounts its keys");
        num_keyed += num_keys;
    }
    if (num_keyed != index_.size()) fail("the index counts a different number of keys than the blocks have");
}

}  // namespace tokenspeed::kv_flat
