// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/block_key.h"

#include <catch2/catch.hpp>
#include <numeric>

using namespace tokenspeed::kv_flat;

namespace {

std::vector<TokenId> counting(std::size_t size) {
    std::vector<TokenId> tokens(size);
    std::iota(tokens.begin(), tokens.end(), 1);
    return tokens;
}

KeyChain chain_of(std::uint32_t key_tokens, KeyContext context, const std::vector<TokenId>& tokens) {
    KeyChain chain(key_tokens, std::move(context));
    chain.extend(tokens);
    return chain;
}

}  // namespace

TEST_CASE("whole blocks have keys, the tail has none, and growing gives the same keys") {
    const auto tokens = counting(70);
    const KeyChain whole = chain_of(16, {}, tokens);
    REQUIRE(whole.keys().size() == 4);
    KeyChain grown(16, {});
    for (std::size_t size = 0; size <= tokens.size(); ++size) grown.extend(std::span(tokens).first(size));
    CHECK(std::ranges::equal(grown.keys(), whole.keys()));
    grown.truncate(40);
    CHECK(grown.keys().size() == 2);
}

TEST_CASE("a key names every token before its end") {
    auto tokens = counting(64);
    const KeyChain before = chain_of(16, {}, tokens);
    tokens[3] = 99;
    const KeyChain after = chain_of(16, {}, tokens);
    for (std::size_t i = 0; i < 4; ++i) CHECK(before.keys()[i] != after.keys()[i]);
}

TEST_CASE("extra keys of different kinds, and of shifted lengths, never collide") {
    const auto tokens = counting(16);
    const std::vector<KeyContext> contexts = {
        {},
        {"a", "", {}},
        {"", "a", {}},
        {"ab", "", {}},
        {"a", "b", {}},
        {"", "ab", {}},
        {"", "", {{0, 8, "a"}}},
        {"", "", {{1, 8, "a"}}},
        {"", "", {{0, 8, "a"}, {8, 16, "b"}}},
        {"", "", {{0, 8, "ab"}}},
        {"", "", {{0, 8, "a"}, {8, 16, ""}}},
    };
    std::vector<Digest> keys;
    for (const KeyContext& context : contexts) keys.push_back(chain_of(16, context, tokens).keys().front());
    for (std::size_t i = 0; i < keys.size(); ++i) {
        for (std::size_t j = 0; j < i; ++j) {
            INFO(i << " against " << j);
            CHECK(keys[i] != keys[j]);
        }
    }
    CHECK(chain_of(8, {}, tokens).keys()[1] != chain_of(16, {}, tokens).keys()[0]);
}

TEST_CASE("a key that looks ahead names the tokens behind its block, and exists once they are known") {
    KeyContext looking;
    looking.lookahead_tokens = 2;
    auto tokens = counting(66);
    const KeyChain before = chain_of(16, looking, tokens);
    REQUIRE(before.keys().size() == 4);
    CHECK(before.keys()[0] != chain_of(16, {}, tokens).keys()[0]);
    KeyChain grown(16, looking);
    for (std::size_t size = 0; size <= tokens.size(); ++size) {
        grown.extend(std::span(tokens).first(size));
        CHECK(grown.keys().size() == (size < 2 ? 0 : (size - 2) / 16));
    }
    CHECK(std::ranges::equal(grown.keys(), before.keys()));
    grown.truncate(49);
    CHECK(grown.keys().size() == 2);

    tokens[33] = 99;  // the second token behind block 1
    const KeyChain after = chain_of(16, looking, tokens);
    CHECK(before.keys()[0] == after.keys()[0]);
    CHECK(before.keys()[1] != after.keys()[1]);
    looking.spans = {{33, 40, "picture"}};
    CHECK(before.keys()[1] != chain_of(16, looking, counting(66)).keys()[1]);
    CHECK(before.keys()[0] == chain_of(16, looking, counting(66)).keys()[0]);
}

TEST_CASE("content inside a block changes the keys from that block on") {
    const auto tokens = counting(64);
    const KeyChain plain = chain_of(16, {}, tokens);
    const KeyChain image = chain_of(16, {"", "", {{20, 30, "picture"}}}, tokens);
    CHECK(plain.keys()[0] == image.keys()[0]);
    for (std::size_t i = 1; i < 4; ++i) CHECK(plain.keys()[i] != image.keys()[i]);
}
