// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/joint_match.h"

#include <algorithm>
#include <numeric>

namespace tokenspeed::kv_flat {

JointMatcher::JointMatcher(const BlockPool& pool, const WriteClock& clock, std::span<const GroupSpec> groups,
                           std::uint32_t key_tokens)
    : pool_(pool), clock_(clock), groups_(groups), key_tokens_(key_tokens), align_tokens_(1) {
    for (const GroupSpec& group : groups) align_tokens_ = std::lcm(align_tokens_, group.block_tokens);
}

Match JointMatcher::find(std::span<const Digest> keys, std::uint32_t max_tokens, MatchEnd end) const {
    Match match;
    match.blocks.resize(groups_.size());
    const Search search{keys, end == MatchEnd::kLogicalBlock ? key_tokens_ : align_tokens_, end};
    std::uint32_t length = std::min(max_tokens, static_cast<std::uint32_t>(keys.size()) * key_tokens_);
    length -= length % search.grain_tokens;

    // A full group's hits reach back to token 0, so they are found once and only ever cut. A windowed group may be
    // valid at one length and not at a shorter one, so it is asked again until the length stands still.
    for (GroupId group = 0; group < groups_.size(); ++group) {
        if (groups_[group].retention == Retention::kFull)
            length = full_prefix(search, group, length, match.blocks[group]);
    }
    const bool has_attention =
        std::ranges::any_of(groups_, [](const GroupSpec& group) { return group.retention != Retention::kState; });
    if (has_attention) match.num_attention_tokens = length = joint_prefix(search, length, false, match.blocks);
    length = joint_prefix(search, length, true, match.blocks);
    if (!has_attention) match.num_attention_tokens = length;
    match.num_tokens = length;
    for (GroupId group = 0; group < groups_.size(); ++group) {
        match.blocks[group].resize(ceil_div(length, groups_[group].block_tokens));
    }
    count_owners(match);
    return match;
}

std::uint32_t JointMatcher::joint_prefix(const Search& search, std::uint32_t length, bool with_states,
                                         std::vector<std::vector<BlockId>>& blocks) const {
    for (bool settled = false; !settled && length > 0;) {
        settled = true;
        for (GroupId group = 0; group < groups_.size(); ++group) {
            std::uint32_t shorter = length;
            switch (groups_[group].retention) {
                case Retention::kFull:
                    shorter = cut_full(search, group, length, blocks[group]);
                    break;
                case Retention::kSlidingWindow:
                case Retention::kChunk:
                    shorter = windowed_prefix(search, group, length, blocks[group]);
                    break;
                case Retention::kState:
                    if (with_states) shorter = state_prefix(search, group, length, blocks[group]);
                    break;
            }
            settled = settled && shorter == length;
            length = shorter;
        }
    }
    return length;
}

JointMatcher::Run JointMatcher::run_at(const Search& search, GroupId group, std::uint32_t index,
                                       std::uint32_t wanted_units) const noexcept {
    const std::uint32_t num_units = groups_[group].block_tokens / key_tokens_;
    const std::uint32_t begin = index * num_units;
    const auto find = [&](std::uint32_t units) { return pool_.find(search.keys[begin + units - 1], group); };
    // A block that holds more of the sequence than wanted serves, too: of two blocks with a common beginning only one
    // has the keys of that beginning.
    const std::uint32_t most = std::min(num_units, static_cast<std::uint32_t>(search.keys.size()) - begin);
    for (std::uint32_t units = wanted_units; units <= most; ++units) {
        if (const BlockId block = find(units); block != kNullBlock) return usable({block, units}, group, wanted_units);
    }
    if (search.end == MatchEnd::kPhysicalBlock) return {};
    for (std::uint32_t units = wanted_units - 1; units > 0; --units) {
        if (const BlockId block = find(units); block != kNullBlock) return usable({block, units}, group, units);
    }
    return {};
}

JointMatcher::Run JointMatcher::usable(Run run, GroupId group, std::uint32_t num_units) const noexcept {
    if (num_units * key_tokens_ < groups_[group].block_tokens) num_units = clock_.num_settled(run.block, num_units);
    return {run.block, num_units};
}

std::uint32_t JointMatcher::full_prefix(const Search& search, GroupId group, std::uint32_t max_tokens,
                                        std::vector<BlockId>& blocks) const {
    const std::uint32_t block_tokens = groups_[group].block_tokens;
    const std::uint32_t num_units = block_tokens / key_tokens_;
    const std::uint32_t num_whole = max_tokens / block_tokens;
    blocks.reserve(num_whole + 1);
    pool_.find_run(search.keys, num_units - 1, num_units, num_whole, group, blocks);
    std::uint32_t length = static_cast<std::uint32_t>(blocks.size()) * block_tokens;
    const std::uint32_t tail_units = std::min(max_tokens - length, block_tokens) / key_tokens_;
    if (tail_units > 0) {
        const Run run = run_at(search, group, static_cast<std::uint32_t>(blocks.size()), tail_units);
        if (run.num_units > 0) blocks.push_back(run.block);
        length += run.num_units * key_tokens_;
    }
    return length - length % search.grain_tokens;
}

std::uint32_t JointMatcher::cut_full(const Search& search, GroupId group, std::uint32_t length,
                                     std::vector<BlockId>& blocks) const {
    const std::uint32_t block_tokens = groups_[group].block_tokens;
    const std::uint32_t tail_tokens = length % block_tokens;
    if (tail_tokens == 0) return length;
    // Another group ended the match inside a block that this one would have shared whole.
    const Run run = usable({blocks[length / block_tokens], 0}, group, tail_tokens / key_tokens_);
    const std::uint32_t shorter = length - tail_tokens + run.num_units * key_tokens_;
    return shorter - shorter % search.grain_tokens;
}

std::uint32_t JointMatcher::windowed_prefix(const Search& search, GroupId group, std::uint32_t max_tokens,
                                            std::vector<BlockId>& blocks) const {
    // Walks from the right. `length` is the candidate; blocks from `index` on are known to be warm.
    const GroupSpec& spec = groups_[group];
    std::uint32_t length = max_tokens;
    std::uint32_t index = ceil_div(length, spec.block_tokens);
    blocks.assign(index, kNullBlock);
    while (index > spec.num_dead_blocks(length)) {
        const std::uint32_t begin = (index - 1) * spec.block_tokens;
        const std::uint32_t wanted = std::min(length - begin, spec.block_tokens) / key_tokens_;
        const Run run = run_at(search, group, index - 1, wanted);
        if (run.num_units < wanted) {  // cold: the hit must end here at the latest
            length = begin + run.num_units * key_tokens_;
            length -= length % search.grain_tokens;
            index = ceil_div(length, spec.block_tokens);
            blocks.assign(index, kNullBlock);
            if (length <= begin) continue;
        }
        blocks[--index] = run.block;
    }
    return length;
}

std::uint32_t JointMatcher::state_prefix(const Search& search, GroupId group, std::uint32_t max_tokens,
                                         std::vector<BlockId>& blocks) const {
    const std::uint32_t block_tokens = groups_[group].block_tokens;
    const std::uint32_t num_units = block_tokens / key_tokens_;
    for (std::uint32_t length = max_tokens; length > 0; length -= search.grain_tokens) {
        const std::uint32_t unit = length / key_tokens_ - 1;
        const BlockId block = pool_.find(search.keys[unit], group);
        if (block == kNullBlock || !clock_.is_settled(block, unit % num_units)) continue;
        blocks.assign(ceil_div(length, block_tokens), kNullBlock);
        blocks.back() = block;
        return length;
    }
    blocks.clear();
    return 0;
}

void JointMatcher::count_owners(Match& match) const noexcept {
    for (GroupId group = 0; group < groups_.size(); ++group) {
        const std::uint32_t num_whole = match.num_tokens / groups_[group].block_tokens;
        for (std::uint32_t index = 0; index < match.blocks[group].size(); ++index) {
            const BlockId block = match.blocks[group][index];
            if (block == kNullBlock) continue;
            const bool is_owned = pool_.num_owners(block) > 0;
            if (index < num_whole) {
                ++(is_owned ? match.num_shared_blocks : match.num_idle_blocks);
            } else if (!is_owned) {
                const std::uint32_t tail_units = match.num_tokens % groups_[group].block_tokens / key_tokens_;
                ++(may_adopt(group, block, tail_units) ? match.num_idle_blocks : match.num_copied_idle_blocks);
            }
        }
    }
}

}  // namespace tokenspeed::kv_flat
