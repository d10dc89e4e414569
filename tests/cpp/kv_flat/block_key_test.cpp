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
        {"", "", {{0, 9, "a"}}},
        {"", "", {{0, 8, "a"}, {8, 16, "a"}}},
        {"", "", {{0, 16, "a"}}},
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

TEST_CASE("the order in which spans are given does not matter, nor do spans of other blocks") {
    const auto tokens = counting(64);
    const std::vector<ContentSpan> spans = {{2, 6, "a"}, {8, 40, "b"}, {12, 14, "c"}, {50, 60, "d"}};
    const KeyChain whole = chain_of(16, {"", "", spans}, tokens);
    const KeyChain reversed = chain_of(16, {"", "", {spans.rbegin(), spans.rend()}}, tokens);
    CHECK(std::ranges::equal(whole.keys(), reversed.keys()));
    const KeyChain without_last = chain_of(16, {"", "", {spans.begin(), spans.end() - 1}}, tokens);
    CHECK(std::ranges::equal(whole.keys().first(3), without_last.keys().first(3)));
    CHECK(whole.keys()[3] != without_last.keys()[3]);
    const KeyChain without_middle = chain_of(16, {"", "", {spans[0], spans[2], spans[3]}}, tokens);
    CHECK(whole.keys()[0] != without_middle.keys()[0]);
}

TEST_CASE("a chain that was cut and grown again sees its spans anew") {
    const auto tokens = counting(64);
    KeyChain chain = chain_of(16, {"", "", {{2, 6, "a"}, {40, 44, "b"}}}, tokens);
    const std::vector<Digest> before(chain.keys().begin(), chain.keys().end());
    chain.truncate(0);
    chain.extend(tokens);
    CHECK(std::ranges::equal(chain.keys(), before));
}
