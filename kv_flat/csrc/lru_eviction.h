// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kv_flat/csrc/eviction_policy.h"

namespace tokenspeed::kv_flat {

/// Least recently released first.
class LruEviction final : public EvictionPolicy {
  public:
    explicit LruEviction(BlockLinks& links) noexcept : links_(links) {}

    void open_run(const Departure& /*departure*/) override {}
    void close_run() noexcept override {}
    void add(BlockId block) noexcept override { blocks_.push_back(links_, block); }
    void adopt(BlockId block) noexcept override { blocks_.erase(links_, block); }
    void settle(std::uint64_t /*session*/) noexcept override {}
    void remove(BlockId block) noexcept override { blocks_.erase(links_, block); }

    [[nodiscard]] Victim pop() noexcept override {
        const BlockId block = blocks_.front();
        blocks_.erase(links_, block);
        return {block, EvictionKind::kIdle};
    }
    [[nodiscard]] CountsByKind num_blocks() const override {
        CountsByKind counts{};
        counts[static_cast<std::size_t>(EvictionKind::kIdle)] = blocks_.size();
        return counts;
    }
    [[nodiscard]] std::vector<IdleBlock> idle_blocks() const override {
        std::vector<IdleBlock> places;
        for (const BlockId block : order()) places.push_back({block, EvictionKind::kIdle, 0, 0, 0});
        return places;
    }
    [[nodiscard]] double bytes_per_block() const noexcept override { return 0.0; }
    [[nodiscard]] std::vector<BlockId> order() const override {
        std::vector<BlockId> order;
        blocks_.append_to(order, links_, links_.size());
        return order;
    }

  private:
    BlockLinks& links_;
    BlockList blocks_;
};

}  // namespace tokenspeed::kv_flat
