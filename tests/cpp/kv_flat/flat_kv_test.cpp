// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/flat_kv.h"

#include <catch2/catch.hpp>
#include <numeric>
#include <set>
#include <string>

using namespace tokenspeed::kv_flat;

namespace {

KvConfig config_of(std::uint32_t num_blocks, std::vector<GroupSpec> groups) {
    KvConfig config;
    config.num_blocks = num_blocks;
    config.key_tokens = 4;
    config.in_flight_tokens = 8;
    config.record_events = true;
    config.groups = std::move(groups);
    return config;
}

struct Prompt {
    explicit Prompt(std::size_t size) : tokens(size), chain(4, {}) {
        std::iota(tokens.begin(), tokens.end(), 0);
        chain.extend(tokens);
    }
    std::vector<TokenId> tokens;
    KeyChain chain;
};

const GroupSpec kFull{"full", 4, Retention::kFull, 0};
const GroupSpec kWindow{"window", 4, Retention::kSlidingWindow, 6};

}  // namespace

TEST_CASE("extending is all or nothing over all groups") {
    FlatKv kv(config_of(6, {kFull, kWindow}));
    KvSequence sequence = kv.open(kv.no_match());
    REQUIRE(kv.extend(sequence, 8));
    CHECK(kv.pool().num_free() == 1);
    CHECK_FALSE(kv.extend(sequence, 9));
    CHECK(sequence.table(0).size() == 2);
    CHECK(sequence.table(1).size() == 2);
    CHECK(kv.pool().num_free() == 1);
}

TEST_CASE("a window gives back what no later token reads, and a hit needs only the window") {
    FlatKv kv(config_of(20, {kFull, kWindow}));
    const Prompt prompt(20);
    {
        KvSequence sequence = kv.open(kv.no_match());
        REQUIRE(kv.extend(sequence, 20));
        kv.publish(sequence, prompt.chain, prompt.tokens, 20);
        kv.retire(sequence, 20);
        // Token 20 reads tokens 15 to 20: blocks 0, 1 and 2 of the window group are dead.
        CHECK(sequence.table(1).num_held() == 2);
        CHECK(sequence.table(0).num_held() == 5);
    }
    const Match match = kv.probe(prompt.chain.keys(), 19);
    CHECK(match.num_tokens == 16);
    CHECK(match.blocks[1][0] == kNullBlock);
    CHECK(match.blocks[1][3] != kNullBlock);
    CHECK(match.num_idle_blocks == 4 + 2);
}

TEST_CASE("replaying events gives the set of blocks that can be hit") {
    FlatKv kv(config_of(8, {kFull}));
    std::set<std::string> replayed;
    const auto replay = [&] {
        for (const KvEvent& event : kv.pool().events().drain()) {
            const std::string key(event.key.bytes.begin(), event.key.bytes.end());
            if (event.kind == KvEvent::Kind::kStored) CHECK(replayed.insert(key).second);
            if (event.kind == KvEvent::Kind::kRemoved) CHECK(replayed.erase(key) == 1);
            if (event.kind == KvEvent::Kind::kCleared) replayed.clear();
        }
    };
    const Prompt prompt(24);
    {
        KvSequence sequence = kv.open(kv.no_match());
        REQUIRE(kv.extend(sequence, 24));
        kv.publish(sequence, prompt.chain, prompt.tokens, 24);
        replay();
        CHECK(replayed.size() == 6);
    }
    {
        KvSequence other = kv.open(kv.no_match());
        REQUIRE(kv.extend(other, 12));
        replay();
        CHECK(replayed.size() == 4);  // one blank block, then the tail of the cached prompt
        CHECK(kv.probe(prompt.chain.keys(), 24).num_tokens == 16);
    }
    REQUIRE(kv.pool().clear_cache());
    replay();
    CHECK(replayed.empty());
}

TEST_CASE("a configuration that makes no sense is refused by name") {
    CHECK_THROWS_WITH(FlatKv(config_of(8, {{"odd", 6, Retention::kFull, 0}})),
                      Catch::Contains("groups[odd].block_tokens is 6"));
}

TEST_CASE("without groups sequences hold nothing and always fit, and no prefix is found") {
    FlatKv kv(config_of(2, {}));
    KvSequence sequence = kv.open(kv.no_match());
    CHECK(kv.least_held_blocks(1000) == 0);
    CHECK(kv.fitting_tokens(sequence, 1000, 0) == 1000);
    REQUIRE(kv.extend(sequence, 1000));
    KeyChain chain(4, {});
    const std::vector<TokenId> tokens(16, 7);
    chain.extend(tokens);
    kv.publish(sequence, chain, tokens, 16);
    CHECK(kv.probe(chain.keys(), 15).num_tokens == 0);
    CHECK(sequence.num_held_blocks() == 0);
}
