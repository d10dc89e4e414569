// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv_flat/csrc/block_pool.h"
#include "kv_flat/csrc/group_spec.h"
#include "kv_flat/csrc/write_clock.h"

namespace tokenspeed::kv_flat {

/// What the cache holds of a sequence: the longest prefix that is valid in every group, and the blocks that hold it.
/// Only a reading: nothing is owned until FlatKv::open adopts it.
struct Match {
    std::uint32_t num_tokens = 0;
    /// The longest prefix that is valid in all groups but those that keep states; num_tokens or more.
    std::uint32_t num_attention_tokens = 0;
    /// By group; null where the window does not reach. The last one may hold only its first tokens of the match.
    std::vector<std::vector<BlockId>> blocks;

    /// Blocks of the match that another sequence owns and that are shared: they take nothing from the free queue.
    std::uint32_t num_shared_blocks = 0;
    /// Blocks of the match that nobody owns: adopting them takes them out of the free queue.
    std::uint32_t num_idle_blocks = 0;
    /// Blocks that nobody owns and that are only copied from: out of the free queue until the copy has run.
    std::uint32_t num_copied_idle_blocks = 0;
};

/// Where a match may end.
enum class MatchEnd : std::uint8_t {
    kLogicalBlock,   ///< at any key: a block that the match ends in is adopted or copied
    kPhysicalBlock,  ///< at a multiple of every group's block: blocks are only shared
};

/// Finds the joint match over all groups.
class JointMatcher {
  public:
    /// @param key_tokens tokens per key; divides every group's block
    JointMatcher(const BlockPool& pool, const WriteClock& clock, std::span<const GroupSpec> groups,
                 std::uint32_t key_tokens);

    /// @param keys the sequence's keys, from its start
    /// @param max_tokens the match may not be longer (the last token must be computed to get logits)
    [[nodiscard]] Match find(std::span<const Digest> keys, std::uint32_t max_tokens, MatchEnd end) const;

    /// Whether a sequence may write on in `block` behind its first `num_units` logical blocks: nobody would notice.
    /// Never in a state: writing on replaces it.
    [[nodiscard]] bool may_adopt(GroupId group, BlockId block, std::uint32_t num_units) const noexcept {
        return groups_[group].retention != Retention::kState && pool_.num_owners(block) == 0 &&
               !pool_.has_key_from(block, num_units);
    }

  private:
    struct Run {
        BlockId block = kNullBlock;
        std::uint32_t num_units = 0;  // leading logical blocks of the match that it holds and that may be used
    };
    struct Search {
        std::span<const Digest> keys;
        std::uint32_t grain_tokens;  // lengths are multiples of this
        MatchEnd end;
    };

    [[nodiscard]] Run run_at(const Search& search, GroupId group, std::uint32_t index,
                             std::uint32_t wanted_units) const noexcept;
    [[nodiscard]] Run usable(Run run, GroupId group, std::uint32_t num_units) const noexcept;
    [[nodiscard]] std::uint32_t full_prefix(const Search& search, GroupId group, std::uint32_t max_tokens,
                                            std::vector<BlockId>& blocks) const;
    [[nodiscard]] std::uint32_t cut_full(const Search& search, GroupId group, std::uint32_t length,
                                         std::vector<BlockId>& blocks) const;
    [[nodiscard]] std::uint32_t state_prefix(const Search& search, GroupId group, std::uint32_t max_tokens,
                                             std::vector<BlockId>& blocks) const;
    /// The longest prefix, at most `length`, that is valid in all groups; those with states are left out on request.
    [[nodiscard]] std::uint32_t joint_prefix(const Search& search, std::uint32_t length, bool with_states,
                                             std::vector<std::vector<BlockId>>& blocks) const;
    [[nodiscard]] std::uint32_t windowed_prefix(const Search& search, GroupId group, std::uint32_t max_tokens,
                                                std::vector<BlockId>& blocks) const;
    void count_owners(Match& match) const noexcept;

    const BlockPool& pool_;
    const WriteClock& clock_;
    std::span<const GroupSpec> groups_;
    std::uint32_t key_tokens_;
    std::uint32_t align_tokens_;  // a multiple of every group's block
};

}  // namespace tokenspeed::kv_flat
