// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/block_pool.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <numeric>
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

BlockPool::BlockPool(std::uint32_t num_blocks, bool record_events, std::uint32_t most_units,
                     const EvictionSpec& eviction)
    : owners_(num_blocks),
      links_(num_blocks),
      policy_(make_eviction_policy(eviction, links_)),
      most_units_(most_units),
      unit_shift_(static_cast<std::uint32_t>(std::bit_width(most_units - 1))),
      index_(num_blocks << unit_shift_),
      num_keys_(num_blocks),
      evicted_keys_(num_blocks << unit_shift_),
      events_(record_events),
      num_usable_(num_blocks - 1) {
    if (num_blocks < 2) {
        throw std::invalid_argument("num_blocks is " + std::to_string(num_blocks) +
                                    "; a pool needs at least 2 (the null block and one for use)");
    }
    for (BlockId block = 1; block < num_blocks; ++block) blank_.push_back(links_, block);
    num_free_ = num_usable_;
}

BlockPool::~BlockPool() {
    if (num_in_use() == 0) return;
    std::fprintf(stderr, "BlockPool destroyed while %u blocks are owned\n", num_in_use());
    std::abort();
}

BlockRef BlockPool::take() {
    if (blank_.empty()) evict(policy_->pop());
    const BlockId block = blank_.front();
    blank_.erase(links_, block);
    --num_free_;
    if (residency_) residency_->note_taken(block);
    owners_[block] = 1;
    return {*this, block};
}

void BlockPool::find_run(std::span<const Digest> keys, std::size_t first, std::size_t stride, std::size_t count,
                         GroupId group, std::vector<BlockId>& blocks) const {
    const std::size_t begin = blocks.size();
    index_.find_run(keys, first, stride, count, group, blocks);
    if (unit_shift_ == 0) return;
    for (std::size_t index = begin; index < blocks.size(); ++index) blocks[index] >>= unit_shift_;
}

void BlockPool::evict(const Victim& victim) noexcept {
    ++num_evictions_[static_cast<std::size_t>(victim.kind)];
    for (std::uint32_t unit = 0; unit < most_units_; ++unit) {
        const std::uint32_t keyed = entry(victim.block, unit);
        if (index_.has_key(keyed)) evicted_keys_.add(index_.key(keyed), index_.group(keyed));
    }
    forget(victim.block);
    blank_.push_front(links_, victim.block);
}

BlockRef BlockPool::share(BlockId block) {
    if (owners_[block]++ == 0) {
        policy_->adopt(block);
        --num_free_;
    }
    if (residency_) residency_->note_hit(block);
    return {*this, block};
}

bool BlockPool::publish(BlockId block, const Digest& key, GroupId group, std::uint32_t unit) noexcept {
    if (index_.has_key(entry(block, unit))) return false;
    if (!index_.insert(key, group, entry(block, unit))) return false;
    ++num_keys_[block];
    return true;
}

void BlockPool::make_blank(BlockId block) noexcept {
    policy_->remove(block);
    blank_.push_front(links_, block);
}

bool BlockPool::has_key_from(BlockId block, std::uint32_t unit) const noexcept {
    for (; unit < most_units_; ++unit) {
        if (index_.has_key(entry(block, unit))) return true;
    }
    return false;
}

const Digest& BlockPool::first_key(BlockId block) const noexcept {
    std::uint32_t unit = 0;
    while (unit + 1 < most_units_ && !index_.has_key(entry(block, unit))) ++unit;
    return index_.key(entry(block, unit));
}

void BlockPool::unpublish(BlockId block) noexcept {
    if (!has_key(block)) return;
    forget(block);
    if (owners_[block] == 0) make_blank(block);
}

bool BlockPool::clear_cache() {
    if (num_in_use() > 0) return false;
    forget_keys();
    return true;
}

void BlockPool::forget_keys() noexcept {
    for (const BlockId block : policy_->order()) make_blank(block);
    index_.clear();
    std::ranges::fill(num_keys_, std::uint16_t{0});
    evicted_keys_.clear();
    events_.record({});
    if (residency_) residency_->forget_all();
}

void BlockPool::release(BlockId block) noexcept {
    if (--owners_[block] > 0) return;
    if (has_key(block)) {
        policy_->add(block);
    } else {
        blank_.push_front(links_, block);
    }
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

std::uint64_t BlockPool::num_evictions() const noexcept {
    return std::accumulate(num_evictions_.begin(), num_evictions_.end(), std::uint64_t{0});
}

double BlockPool::bytes_per_block() const noexcept {
    const double bytes_per_key = index_.bytes_per_block() + evicted_keys_.bytes_per_block();
    return sizeof(owners_[0]) + sizeof(links_[0]) + sizeof(num_keys_[0]) + policy_->bytes_per_block() +
           bytes_per_key * static_cast<double>(std::uint64_t{1} << unit_shift_);
}

std::vector<BlockId> BlockPool::free_order() const {
    std::vector<BlockId> order;
    blank_.append_to(order, links_, links_.size());
    const std::vector<BlockId> cached = policy_->order();
    order.insert(order.end(), cached.begin(), cached.end());
    return order;
}

void BlockPool::check_integrity(const std::vector<std::uint32_t>& owners) const {
    const auto fail = [](const std::string& what) { throw std::logic_error("block pool: " + what); };
    std::vector<bool> queued(owners_.size());
    const std::vector<BlockId> order = free_order();
    for (std::size_t i = 0; i < order.size(); ++i) {
        if (queued[order[i]]) fail("block " + std::to_string(order[i]) + " stands twice among the free blocks");
        queued[order[i]] = true;
        if (has_key(order[i]) != (i >= blank_.size()))
            fail("block " + std::to_string(order[i]) + " stands among the blank blocks and has a key, or the reverse");
    }
    if (order.size() != num_free_) {
        fail("free blocks are " + std::to_string(order.size()) + ", count says " + std::to_string(num_free_));
    }
    const CountsByKind by_kind = policy_->num_blocks();
    if (std::accumulate(by_kind.begin(), by_kind.end(), std::uint64_t{0}) + blank_.size() != num_free_)
        fail("the eviction policy miscounts its blocks");
    check_owners(owners, queued);
}

void BlockPool::check_owners(const std::vector<std::uint32_t>& owners, const std::vector<bool>& queued) const {
    const auto fail = [](const std::string& what) { throw std::logic_error("block pool: " + what); };
    std::uint32_t num_keyed = 0;
    for (BlockId block = 1; block < owners_.size(); ++block) {
        if (owners_[block] != owners[block]) {
            fail("block " + std::to_string(block) + " counts " + std::to_string(owners_[block]) + " owners, has " +
                 std::to_string(owners[block]));
        }
        if ((owners_[block] == 0) != queued[block])
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
