// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/joint_match.h"

#include <numeric>

namespace tokenspeed::kv_flat {

JointMatcher::JointMatcher(const BlockPool& pool, std::span<const GroupSpec> groups, std::uint32_t key_tokens)
    : pool_(pool), groups_(groups), key_tokens_(key_tokens), align_tokens_(1) {
    for (const GroupSpec& group : groups) align_tokens_ = std::lcm(align_tokens_, group.block_tokens);
}

Match JointMatcher::find(std::span<const Digest> keys, std::uint32_t max_tokens) const {
    Match match;
    match.blocks.resize(groups_.size());
    std::uint32_t length = std::min(max_tokens, static_cast<std::uint32_t>(keys.size()) * key_tokens_);
    length -= length % align_tokens_;

    // A full group's hits reach back to token 0, so they are found once and only ever cut. A windowed group may be
    // valid at one length and not at a shorter one, so it is asked again until the length stands still.
    for (GroupId group = 0; group < groups_.size(); ++group) {
        if (groups_[group].retention == Retention::kFull)
            length = full_prefix(keys, group, length, match.blocks[group]);
    }
    for (bool settled = false; !settled && length > 0;) {
        settled = true;
        for (GroupId group = 0; group < groups_.size(); ++group) {
            if (groups_[group].retention == Retention::kFull) continue;
            const std::uint32_t shorter = windowed_prefix(keys, group, length, match.blocks[group]);
            settled = settled && shorter == length;
            length = shorter;
        }
    }
    match.num_tokens = length;
    for (GroupId group = 0; group < groups_.size(); ++group) {
        match.blocks[group].resize(length / groups_[group].block_tokens);
    }
    count_owners(match);
    return match;
}

BlockId JointMatcher::block_at(std::span<const Digest> keys, GroupId group, std::uint32_t index) const noexcept {
    const std::uint32_t keys_per_block = groups_[group].block_tokens / key_tokens_;
    return pool_.find(keys[(index + 1) * keys_per_block - 1], group);
}

std::uint32_t JointMatcher::full_prefix(std::span<const Digest> keys, GroupId group, std::uint32_t max_tokens,
                                        std::vector<BlockId>& blocks) const {
    const std::uint32_t num_blocks = max_tokens / groups_[group].block_tokens;
    blocks.reserve(num_blocks);
    while (blocks.size() < num_blocks) {
        const BlockId block = block_at(keys, group, static_cast<std::uint32_t>(blocks.size()));
        if (block == kNullBlock) break;
        blocks.push_back(block);
    }
    const std::uint32_t length = static_cast<std::uint32_t>(blocks.size()) * groups_[group].block_tokens;
    return length - length % align_tokens_;
}

std::uint32_t JointMatcher::windowed_prefix(std::span<const Digest> keys, GroupId group, std::uint32_t max_tokens,
                                            std::vector<BlockId>& blocks) const {
    // Walks from the right. `end` is the candidate length in blocks; [index, end) are known to be warm.
    const GroupSpec& spec = groups_[group];
    const std::uint32_t align_blocks = align_tokens_ / spec.block_tokens;
    const std::uint32_t wanted = spec.num_window_blocks();
    std::uint32_t end = max_tokens / spec.block_tokens;
    blocks.assign(end, kNullBlock);
    for (std::uint32_t index = end; index > 0 && end - index < wanted;) {
        const BlockId block = block_at(keys, group, index - 1);
        if (block != kNullBlock) {
            blocks[--index] = block;
            continue;
        }
        end = (index - 1) - (index - 1) % align_blocks;  // cold: the hit must end before it
        blocks.assign(end, kNullBlock);
        index = end;
    }
    return end * spec.block_tokens;
}

void JointMatcher::count_owners(Match& match) const noexcept {
    for (const auto& blocks : match.blocks) {
        for (const BlockId block : blocks) {
            if (block == kNullBlock) continue;
            ++(pool_.num_owners(block) > 0 ? match.num_shared_blocks : match.num_idle_blocks);
        }
    }
}

}  // namespace tokenspeed::kv_flat
