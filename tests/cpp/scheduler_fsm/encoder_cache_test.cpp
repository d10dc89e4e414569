// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/encoder_cache.h"

#include <catch2/catch.hpp>

using namespace tokenspeed::scheduler_fsm;
using Identifiers = std::vector<std::string>;

TEST_CASE("an output stays after its last reference, and is shared while it is there") {
    EncoderCache cache(10);
    const EncoderName first = cache.name("a", 4);
    const EncoderName second = cache.name("a", 4);
    CHECK(first.index() == second.index());
    EncoderRef ref = cache.allocate(first);
    CHECK(cache.is_held(second));
    CHECK(cache.num_available_embeds() == 6);
    EncoderRef other = cache.hold(second);
    ref.reset();
    CHECK(cache.num_available_embeds() == 6);
    other.reset();
    CHECK(cache.is_cached(first));
    CHECK_FALSE(cache.is_held(first));
    CHECK(cache.num_available_embeds() == 10);
    CHECK(cache.take_evicted().empty());
    CHECK(cache.counters().num_runs == 1);
    CHECK(cache.counters().num_shared == 1);
    cache.check_integrity();
}

TEST_CASE("room is made from what nobody holds, least recently let go first") {
    EncoderCache cache(10);
    const EncoderName a = cache.name("a", 4);
    const EncoderName b = cache.name("b", 3);
    const EncoderName c = cache.name("c", 3);
    const EncoderName d = cache.name("d", 5);
    EncoderRef held = cache.allocate(c);
    {
        EncoderRef first = cache.allocate(a);
        EncoderRef second = cache.allocate(b);
        first.reset();
    }
    EncoderRef again = cache.hold(a);
    again.reset();  // b was let go before it now
    REQUIRE(cache.num_available_embeds() == 7);
    const EncoderRef ref = cache.allocate(d);
    CHECK(cache.take_evicted() == Identifiers{"b", "a"});
    CHECK(cache.take_evicted().empty());
    CHECK(cache.is_held(c));
    CHECK(cache.num_available_embeds() == 2);
    CHECK(cache.counters().num_evictions == 2);
    cache.check_integrity();
}

TEST_CASE("one that goes and comes back within a plan is not reported") {
    EncoderCache cache(4);
    const EncoderName a = cache.name("a", 4);
    const EncoderName b = cache.name("b", 4);
    cache.allocate(a).reset();
    cache.allocate(b).reset();
    cache.allocate(a).reset();
    CHECK(cache.take_evicted() == Identifiers{"b"});
    cache.check_integrity();
}

TEST_CASE("an identifier is known while it is cached or a request has it, with one size") {
    EncoderCache cache(4);
    CHECK_FALSE(cache.known_embeds("a").has_value());
    {
        const EncoderName a = cache.name("a", 4);
        CHECK(cache.known_embeds("a") == 4U);
    }
    CHECK_FALSE(cache.known_embeds("a").has_value());
    {
        const EncoderName a = cache.name("a", 2);
        cache.allocate(a).reset();
    }
    CHECK(cache.known_embeds("a") == 2U);
    const EncoderName b = cache.name("b", 4);
    cache.allocate(b).reset();
    CHECK_FALSE(cache.known_embeds("a").has_value());
    CHECK(cache.take_evicted() == Identifiers{"a"});
    cache.check_integrity();
}

TEST_CASE("a reset forgets all outputs, and references from before it keep nothing") {
    EncoderCache cache(8);
    const EncoderName a = cache.name("a", 4);
    EncoderRef before = cache.allocate(a);
    {
        const EncoderName gone = cache.name("gone", 4);
        cache.allocate(gone).reset();
    }
    cache.reset();
    CHECK_FALSE(cache.is_cached(a));
    CHECK_FALSE(cache.known_embeds("gone").has_value());
    CHECK(cache.num_available_embeds() == 8);
    CHECK(cache.take_evicted().empty());
    EncoderRef after = cache.allocate(a);
    before.reset();
    CHECK(cache.is_held(a));
    after.reset();
    CHECK_FALSE(cache.is_held(a));
    cache.check_integrity();
}

TEST_CASE("references move and are dropped once") {
    EncoderCache cache(8);
    const EncoderName a = cache.name("a", 3);
    EncoderRef one = cache.allocate(a);
    EncoderRef two = std::move(one);
    CHECK_FALSE(one);  // NOLINT(bugprone-use-after-move): moved from means empty
    one = std::move(two);
    CHECK(cache.is_held(a));
    one = EncoderRef();
    CHECK_FALSE(cache.is_held(a));
    cache.check_integrity();
}
