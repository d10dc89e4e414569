// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/lost_tokens.h"

#include <catch2/catch.hpp>
#include <numeric>
#include <utility>

#include "kv_flat/csrc/flat_kv.h"
#include "kv_flat/csrc/isolation_watch.h"

using namespace tokenspeed::kv_flat;

namespace {

std::vector<TokenId> numbers(std::size_t size, TokenId first = 0) {
    std::vector<TokenId> tokens(size);
    std::iota(tokens.begin(), tokens.end(), first);
    return tokens;
}

KeyChain chain_of(const std::vector<TokenId>& tokens, std::string salt = "") {
    KeyChain chain(4, {std::move(salt), "", {}, 0});
    chain.extend(tokens);
    return chain;
}

KvConfig config_of(std::uint32_t num_blocks, std::vector<GroupSpec> groups) {
    KvConfig config;
    config.num_blocks = num_blocks;
    config.key_tokens = 4;
    config.groups = std::move(groups);
    return config;
}

void serve(FlatKv& kv, const std::vector<TokenId>& tokens) {
    const KeyChain chain = chain_of(tokens);
    const auto size = static_cast<std::uint32_t>(tokens.size());
    KvSequence sequence = kv.open(kv.no_match());
    REQUIRE(kv.extend(sequence, size));
    kv.publish(sequence, chain, tokens, size);
}

const GroupSpec kFull{"full", 4, Retention::kFull, 0};
const GroupSpec kCoarse{"coarse", 16, Retention::kFull, 0};
const GroupSpec kWindow{"window", 4, Retention::kSlidingWindow, 4};

}  // namespace

TEST_CASE("what is cached behind a match was lost to granularity") {
    FlatKv kv(config_of(8, {kCoarse}));
    serve(kv, numbers(28));
    const KeyChain chain = chain_of(numbers(28));
    const Match match = kv.probe(chain.keys(), 27, false, MatchEnd::kPhysicalBlock);
    REQUIRE(match.num_tokens == 16);
    const LostTokens lost = kv.lost_tokens(chain.keys(), 27, match.num_tokens);
    CHECK(lost.num_granularity == 8);
    CHECK(lost.num_evicted == 0);
    CHECK(lost.num_missing_state == 0);
}

TEST_CASE("everything behind an evicted block is lost, up to what was never there") {
    FlatKv kv(config_of(8, {kFull}));
    serve(kv, numbers(16));
    serve(kv, numbers(20, 1000));  // takes three blanks and the tail of the first
    const KeyChain chain = chain_of(numbers(24));
    const Match match = kv.probe(chain.keys(), 23);
    REQUIRE(match.num_tokens == 8);
    const LostTokens lost = kv.lost_tokens(chain.keys(), 23, match.num_tokens);
    CHECK(lost.num_evicted == 8);
    CHECK(lost.num_granularity == 0);
}

TEST_CASE("a group that keeps less is named when it lacks its part") {
    FlatKv kv(config_of(12, {kFull, kWindow}));
    {
        const std::vector<TokenId> tokens = numbers(16);
        const KeyChain chain = chain_of(tokens);
        KvSequence sequence = kv.open(kv.no_match());
        REQUIRE(kv.extend(sequence, 16));
        kv.publish(sequence, chain, tokens, 16);
        kv.retire(sequence, 16, 16);
        serve(kv, numbers(12, 1000));  // evicts what the window left behind
        const Match match = kv.probe(chain.keys(), 11);
        REQUIRE(match.num_tokens == 0);
        const LostTokens lost = kv.lost_tokens(chain.keys(), 11, match.num_tokens);
        CHECK(lost.num_missing_state == 8);
        CHECK(lost.num_granularity == 0);
    }
}

TEST_CASE("what every group still has was lost to granularity, in models that keep less, too") {
    FlatKv kv(config_of(12, {kFull, kWindow}));
    serve(kv, numbers(20));  // the window's blocks are all there
    const KeyChain chain = chain_of(numbers(20));
    REQUIRE(kv.probe(chain.keys(), 19).num_tokens == 16);
    const LostTokens dropped = kv.lost_tokens(chain.keys(), 19, 12);  // such as a drafter's last unit
    CHECK(dropped.num_granularity == 4);
    CHECK(dropped.num_missing_state == 0);
    CHECK(kv.lost_tokens(chain.keys(), 19, 16).num_granularity == 0);
}

TEST_CASE("marks of content are equal for equal beginnings, whatever the salt") {
    const auto marks = content_marks(numbers(18), 4);
    REQUIRE(marks.size() == 4);
    auto other = numbers(18);
    other[9] = 77;
    const auto changed = content_marks(other, 4);
    CHECK(std::equal(marks.begin(), marks.begin() + 2, changed.begin()));
    CHECK(marks[2] != changed[2]);
    CHECK(marks[3] != changed[3]);
    CHECK(content_marks(numbers(3), 4).empty());
}

TEST_CASE("only what another root computed is lost to isolation") {
    IsolationWatch watch(64);
    const auto marks = content_marks(numbers(32), 4);
    const Digest mine = chain_of(numbers(4), "mine").root();
    const Digest theirs = chain_of(numbers(4), "theirs").root();
    CHECK(watch.note(marks, mine, 0) == 0);
    CHECK(watch.note(marks, mine, 0) == 0);
    CHECK(watch.note(std::span(marks).first(5), theirs, 2) == 3);
    // The last to compute a block owns it.
    CHECK(watch.note(marks, mine, 0) == 5);
    watch.clear();
    CHECK(watch.note(marks, theirs, 0) == 0);
}
