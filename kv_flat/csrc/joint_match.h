// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv_flat/csrc/block_pool.h"
#include "kv_flat/csrc/group_spec.h"

namespace tokenspeed::kv_flat {

/// What the cache holds of a sequence: the longest prefix that is valid in every group, and the blocks that hold it.
/// Only a reading: nothing is owned until FlatKv::open adopts it.
struct Match {
    std::uint32_t num_tokens = 0;
    std::vector<std::vector<BlockId>> blocks;  ///< by group; null where the window does not reach

    /// Blocks of the match that another sequence owns: adopting them takes nothing from the free queue.
    std::uint32_t num_shared_blocks = 0;
    /// Blocks of the match that nobody owns: adopting them takes them out of the free queue.
    std::uint32_t num_idle_blocks = 0;
};

/// Finds the joint match over all groups.
class JointMatcher {
  public:
    /// @param key_tokens tokens per key; divides every group's block
    JointMatcher(const BlockPool& pool, std::span<const GroupSpec> groups, std::uint32_t key_tokens);

    /// @param keys the sequence's keys, from its start
    /// @param max_tokens the match may not be longer (the last token must be computed to get logits)
    [[nodiscard]] Match find(std::span<const Digest> keys, std::uint32_t max_tokens) const;

  private:
    [[nodiscard]] BlockId block_at(std::span<const Digest> keys, GroupId group, std::uint32_t index) const noexcept;
    [[nodiscard]] std::uint32_t full_prefix(std::span<const Digest> keys, GroupId group, std::uint32_t max_tokens,
                                            std::vector<BlockId>& blocks) const;
    [[nodiscard]] std::uint32_t windowed_prefix(std::span<const Digest> keys, GroupId group, std::uint32_t max_tokens,
                                                std::vector<BlockId>& blocks) const;
    void count_owners(Match& match) const noexcept;

    const BlockPool& pool_;
    std::span<const GroupSpec> groups_;
    std::uint32_t key_tokens_;
    std::uint32_t align_tokens_;  // a hit ends at a multiple of every group's block
};

}  // namespace tokenspeed::kv_flat
