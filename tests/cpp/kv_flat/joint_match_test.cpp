// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/joint_match.h"

#include <catch2/catch.hpp>
#include <numeric>
#include <random>

#include "kv_flat/csrc/block_key.h"

using namespace tokenspeed::kv_flat;

namespace {

GroupSpec full(std::uint32_t block_tokens) { return {"full", block_tokens, Retention::kFull, 0}; }
GroupSpec windowed(std::uint32_t block_tokens, std::uint32_t window) {
    return {"window", block_tokens, Retention::kSlidingWindow, window};
}

/// The definition, word for word: a length is valid in a group if every block that the next token reads is cached.
bool is_valid(const BlockPool& pool, const GroupSpec& spec, GroupId group, std::span<const Digest> keys,
              std::uint32_t key_tokens, std::uint32_t length) {
    if (length % spec.block_tokens != 0) return false;
    const std::uint32_t begin =
        spec.retention == Retention::kFull || length + 1 <= spec.window_tokens ? 0 : length + 1 - spec.window_tokens;
    for (std::uint32_t block = begin / spec.block_tokens; block < length / spec.block_tokens; ++block) {
        if (pool.find(keys[(block + 1) * (spec.block_tokens / key_tokens) - 1], group) == kNullBlock) return false;
    }
    return true;
}

}  // namespace

TEST_CASE("the match is the longest length that is valid in every group") {
    std::mt19937_64 random(21);
    for (int round = 0; round < 400; ++round) {
        std::vector<GroupSpec> groups = {random() % 4 == 0 ? windowed(4, 9) : full(4)};
        const auto num_more = random() % 3;
        for (std::uint64_t i = 0; i < num_more; ++i) {
            const auto block = static_cast<std::uint32_t>(random() % 2 == 0 ? 4 : 8);
            groups.push_back(random() % 2 == 0 ? full(block)
                                               : windowed(block, static_cast<std::uint32_t>(1 + random() % 30)));
        }
        std::vector<TokenId> tokens(80);
        std::iota(tokens.begin(), tokens.end(), 0);
        KeyChain chain(4, {});
        chain.extend(tokens);

        BlockPool pool(100, false);
        std::vector<BlockRef> held;
        const std::uint64_t percent_cached = 40 + random() % 60;
        for (GroupId group = 0; group < groups.size(); ++group) {
            const std::uint32_t keys_per_block = groups[group].block_tokens / 4;
            for (std::uint32_t key = keys_per_block; key <= chain.keys().size(); key += keys_per_block) {
                if (random() % 100 >= percent_cached) continue;
                held.push_back(pool.take());
                REQUIRE(pool.publish(held.back().id(), chain.keys()[key - 1], group));
            }
        }
        const auto limit = static_cast<std::uint32_t>(random() % 81);
        const Match match = JointMatcher(pool, groups, 4).find(chain.keys(), limit);

        std::uint32_t expected = limit;
        while (expected > 0) {
            bool valid = true;
            for (GroupId group = 0; group < groups.size(); ++group) {
                valid = valid && is_valid(pool, groups[group], group, chain.keys(), 4, expected);
            }
            if (valid) break;
            --expected;
        }
        REQUIRE(match.num_tokens == expected);
        for (GroupId group = 0; group < groups.size(); ++group) {
            REQUIRE(match.blocks[group].size() == expected / groups[group].block_tokens);
        }
        CHECK(match.num_idle_blocks == 0);
    }
}
