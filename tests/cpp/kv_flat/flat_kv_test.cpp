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
        kv.retire(sequence, 20, 20);
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

namespace {

/// Physical blocks of three logical ones.
struct TwoLayers {
    explicit TwoLayers(std::uint32_t num_usable) : kv(config_of(num_usable + 1, {{"full", 12, Retention::kFull, 0}})) {}

    KvSequence compute(const Prompt& prompt, std::uint32_t num_tokens) {
        KvSequence sequence = kv.open(kv.probe(prompt.chain.keys(), num_tokens - 1));
        REQUIRE(kv.extend(sequence, num_tokens));
        kv.publish(sequence, prompt.chain, prompt.tokens, num_tokens);
        return sequence;
    }

    FlatKv kv;
};

Prompt fork_of(const Prompt& prompt, std::uint32_t at) {
    Prompt fork(0);
    fork.tokens = prompt.tokens;
    for (std::size_t i = at; i < fork.tokens.size(); ++i) fork.tokens[i] += 1000;
    fork.chain.extend(fork.tokens);
    return fork;
}

}  // namespace

TEST_CASE("a match that ends inside a block somebody owns is served by a copy") {
    TwoLayers layers(8);
    const Prompt prompt(24);
    const KvSequence first = layers.compute(prompt, 24);
    layers.kv.begin_step();
    const Prompt fork = fork_of(prompt, 20);
    const Match match = layers.kv.probe(fork.chain.keys(), 23);
    CHECK(match.num_tokens == 20);
    CHECK(match.num_shared_blocks == 1);
    CHECK(layers.kv.blocks_to_open(match, 24) == 1);

    KvSequence second = layers.kv.open(match);
    REQUIRE(second.copies().size() == 1);
    CHECK(second.copies()[0].source.id() == first.table(0).ids()[1]);
    CHECK(second.copies()[0].target->id() == second.table(0).ids()[1]);
    CHECK(second.table(0).ids()[1] != first.table(0).ids()[1]);
    CHECK(second.num_warm_blocks(0) == 2);
    CHECK(layers.kv.pool().num_owners(first.table(0).ids()[1]) == 2);
}

TEST_CASE("a block that nobody owns and that ends with the match is written on") {
    TwoLayers layers(8);
    const Prompt prompt(36);
    BlockId tail = kNullBlock;
    {
        const KvSequence first = layers.compute(prompt, 21);
        tail = first.table(0).ids()[1];
    }
    layers.kv.begin_step();
    const Match match = layers.kv.probe(prompt.chain.keys(), 35);
    CHECK(match.num_tokens == 20);
    CHECK(match.num_idle_blocks == 2);
    const KvSequence second = layers.kv.open(match);
    CHECK(second.copies().empty());
    CHECK(second.table(0).ids()[1] == tail);
    CHECK(layers.kv.pool().num_in_use() == 2);
}

TEST_CASE("an idle block with more in it than the match is copied, and kept from others until then") {
    TwoLayers layers(3);
    const Prompt prompt(24);
    static_cast<void>(layers.compute(prompt, 24));
    layers.kv.begin_step();
    const Prompt fork = fork_of(prompt, 16);
    const Match match = layers.kv.probe(fork.chain.keys(), 23);
    CHECK(match.num_tokens == 16);
    CHECK(match.num_copied_idle_blocks == 1);
    CHECK(layers.kv.blocks_to_open(match, 24) == 3);
    {
        KvSequence second = layers.kv.open(match);
        CHECK(layers.kv.pool().num_free() == 0);
        CHECK(layers.kv.pool().num_cached() == 6);
        const std::vector<BlockCopy> copies = second.take_copies();
        REQUIRE(copies.size() == 1);
        CHECK(second.copies().empty());
    }
    CHECK(layers.kv.pool().num_in_use() == 0);
    CHECK(layers.kv.probe(prompt.chain.keys(), 24).num_tokens == 24);
    CHECK(layers.kv.probe(fork.chain.keys(), 23, false, MatchEnd::kPhysicalBlock).num_tokens == 12);
}

TEST_CASE("a block that is taken back loses the keys of all its logical blocks") {
    TwoLayers layers(8);
    const Prompt prompt(36);
    const KvSequence first = layers.compute(prompt, 36);
    layers.kv.pool().unpublish(first.table(0).ids()[1]);
    layers.kv.begin_step();
    CHECK(layers.kv.probe(prompt.chain.keys(), 36).num_tokens == 12);
    CHECK(layers.kv.pool().num_cached() == 6);
}

TEST_CASE("what the step being planned writes ends no match inside a block") {
    TwoLayers layers(8);
    const Prompt prompt(24);
    const KvSequence first = layers.compute(prompt, 24);
    const Prompt fork = fork_of(prompt, 20);
    CHECK(layers.kv.probe(fork.chain.keys(), 23).num_tokens == 12);
    layers.kv.begin_step();
    CHECK(layers.kv.probe(fork.chain.keys(), 23).num_tokens == 20);
    const KvSequence second = layers.kv.open(layers.kv.probe(fork.chain.keys(), 23));
    // What a copy fills in this step is as new as what a row writes.
    CHECK(layers.kv.probe(fork.chain.keys(), 23).num_tokens == 20);
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
