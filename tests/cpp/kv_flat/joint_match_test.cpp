// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/joint_match.h"

#include <algorithm>
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
GroupSpec chunked(std::uint32_t block_tokens, std::uint32_t chunk) {
    return {"chunk", block_tokens, Retention::kChunk, chunk};
}
GroupSpec state(std::uint32_t block_tokens) { return {"state", block_tokens, Retention::kState, 0}; }

constexpr std::uint32_t kKeyTokens = 4;

GroupSpec attention(std::uint32_t block_tokens, std::mt19937_64& random) {
    const auto window = static_cast<std::uint32_t>(1 + random() % 30);
    switch (random() % 4) {
        case 0:
            return windowed(block_tokens, window);
        case 1:
            return chunked(block_tokens, window);
        default:
            return full(block_tokens);
    }
}

/// A pool of one sequence's blocks, each cached up to some logical block, and some of it written by the current step.
struct Cache {
    Cache(std::span<const GroupSpec> specs, std::mt19937_64& random)
        : groups(specs), chain(kKeyTokens, {}), pool(200, false, 3), clock(200, 3, true) {
        std::vector<TokenId> tokens(96);
        std::iota(tokens.begin(), tokens.end(), 0);
        chain.extend(tokens);
        const std::uint64_t percent_cached = 40 + random() % 60;
        for (GroupId group = 0; group < groups.size(); ++group) {
            const std::uint32_t num_units = groups[group].block_tokens / kKeyTokens;
            if (groups[group].retention == Retention::kState) {
                keep_states(group, num_units, random);
                continue;
            }
            for (std::uint32_t begin = 0; begin + num_units <= chain.keys().size(); begin += num_units) {
                if (random() % 100 < percent_cached) fill(group, begin, num_units, random);
            }
        }
    }

    void fill(GroupId group, std::uint32_t begin, std::uint32_t num_units, std::mt19937_64& random) {
        held.push_back(pool.take());
        const auto end = static_cast<std::uint32_t>(random() % 3 == 0 ? 1 + random() % num_units : num_units);
        const auto fresh = static_cast<std::uint32_t>(random() % 4 == 0 ? random() % (end + 1) : end);
        for (std::uint32_t unit = 0; unit < end; ++unit) {
            if (unit >= fresh) clock.note_written(held.back().id(), unit);
            // Another block may have had the keys of its beginning first, and be gone by now.
            if (unit + 1 < end && random() % 4 == 0) continue;
            REQUIRE(pool.publish(held.back().id(), chain.keys()[begin + unit], group, unit));
        }
    }

    /// A state stands for all tokens before its end, and has a block of its own.
    void keep_states(GroupId group, std::uint32_t num_units, std::mt19937_64& random) {
        for (std::uint32_t index = 0; index < chain.keys().size(); ++index) {
            if (random() % 3 != 0) continue;
            held.push_back(pool.take());
            if (random() % 5 == 0) clock.note_written(held.back().id(), index % num_units);
            REQUIRE(pool.publish(held.back().id(), chain.keys()[index], group, index % num_units));
        }
    }

    /// The definition: a state is cached for exactly that length, written by an earlier step.
    [[nodiscard]] bool has_state(GroupId group, std::uint32_t length) const {
        const std::uint32_t index = length / kKeyTokens - 1;
        const BlockId block = pool.find(chain.keys()[index], group);
        return block != kNullBlock && clock.is_settled(block, index % (groups[group].block_tokens / kKeyTokens));
    }

    /// The definition: every block that the next token reads is cached, and the one that the length ends in holds that
    /// much, written by an earlier step.
    [[nodiscard]] bool is_valid(GroupId group, std::uint32_t length) const {
        const GroupSpec& spec = groups[group];
        if (spec.retention == Retention::kState) return has_state(group, length);
        const std::uint32_t num_units = spec.block_tokens / kKeyTokens;
        for (std::uint32_t index = spec.num_dead_blocks(length); index * spec.block_tokens < length; ++index) {
            const std::uint32_t wanted = std::min(num_units, length / kKeyTokens - index * num_units);
            BlockId block = kNullBlock;
            for (std::uint32_t units = wanted; units <= num_units && block == kNullBlock; ++units)
                block = pool.find(chain.keys()[index * num_units + units - 1], group);
            if (block == kNullBlock) return false;
            if (wanted < num_units && clock.num_settled(block, wanted) < wanted) return false;
        }
        return true;
    }

    [[nodiscard]] std::uint32_t longest(std::uint32_t limit, std::uint32_t grain_tokens,
                                        bool with_states = true) const {
        std::uint32_t length = limit - limit % grain_tokens;
        for (; length > 0; length -= grain_tokens) {
            bool valid = true;
            for (GroupId group = 0; group < groups.size(); ++group) {
                const bool counts = with_states || groups[group].retention != Retention::kState;
                valid = valid && (!counts || is_valid(group, length));
            }
            if (valid) break;
        }
        return length;
    }

    std::span<const GroupSpec> groups;
    KeyChain chain;
    BlockPool pool;
    WriteClock clock;
    std::vector<BlockRef> held;
};

}  // namespace

TEST_CASE("the match is the longest length that is valid in every group") {
    std::mt19937_64 random(21);
    for (int round = 0; round < 2000; ++round) {
        std::vector<GroupSpec> groups = {random() % 4 == 0 ? windowed(4, 9) : full(4)};
        const auto num_more = random() % 3;
        if (random() % 3 == 0) groups.clear();
        for (std::uint64_t i = 0; i < num_more || groups.empty(); ++i) {
            const auto block = static_cast<std::uint32_t>(4 * (1 + random() % 3));
            groups.push_back(attention(block, random));
        }
        std::uint32_t align_tokens = 1;
        for (const GroupSpec& group : groups) align_tokens = std::lcm(align_tokens, group.block_tokens);
        const Cache cache(groups, random);
        const auto limit = static_cast<std::uint32_t>(random() % 97);
        const JointMatcher matcher(cache.pool, cache.clock, groups, kKeyTokens);

        const Match match = matcher.find(cache.chain.keys(), limit, MatchEnd::kLogicalBlock);
        REQUIRE(match.num_tokens == cache.longest(limit, kKeyTokens));
        for (GroupId group = 0; group < groups.size(); ++group) {
            REQUIRE(match.blocks[group].size() == ceil_div(match.num_tokens, groups[group].block_tokens));
        }
        CHECK(match.num_idle_blocks + match.num_copied_idle_blocks == 0);
        CHECK(matcher.find(cache.chain.keys(), limit, MatchEnd::kPhysicalBlock).num_tokens ==
              cache.longest(limit, align_tokens));
    }
}

TEST_CASE("with states the match ends where every group has one, and says how much the others would have given") {
    std::mt19937_64 random(22);
    int num_cut_short = 0;
    for (int round = 0; round < 2000; ++round) {
        std::vector<GroupSpec> groups;
        const auto num_attention = random() % 3;
        for (std::uint64_t i = 0; i < num_attention; ++i) {
            const auto block = static_cast<std::uint32_t>(4 * (1 + random() % 3));
            groups.push_back(attention(block, random));
        }
        for (std::uint64_t i = 1 + random() % 2; i > 0; --i)
            groups.push_back(state(static_cast<std::uint32_t>(4 * (1 + random() % 3))));
        std::ranges::shuffle(groups, random);
        const Cache cache(groups, random);
        const auto limit = static_cast<std::uint32_t>(random() % 97);
        const JointMatcher matcher(cache.pool, cache.clock, groups, kKeyTokens);

        const Match match = matcher.find(cache.chain.keys(), limit, MatchEnd::kLogicalBlock);
        REQUIRE(match.num_tokens == cache.longest(limit, kKeyTokens));
        const bool is_mixed = num_attention > 0;
        REQUIRE(match.num_attention_tokens == (is_mixed ? cache.longest(limit, kKeyTokens, false) : match.num_tokens));
        num_cut_short += match.num_tokens < match.num_attention_tokens;
        for (GroupId group = 0; group < groups.size(); ++group) {
            const auto& blocks = match.blocks[group];
            REQUIRE(blocks.size() == ceil_div(match.num_tokens, groups[group].block_tokens));
            if (groups[group].retention != Retention::kState || blocks.empty()) continue;
            CHECK(blocks.back() == cache.pool.find(cache.chain.keys()[match.num_tokens / kKeyTokens - 1], group));
            CHECK(std::ranges::count(blocks, kNullBlock) + 1 == std::ssize(blocks));
        }
    }
    CHECK(num_cut_short > 200);
}
