// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include "tests/cpp/scheduler_fsm/fixture.h"

using namespace tokenspeed::scheduler_fsm;
using namespace tokenspeed::scheduler_fsm::testing;

using Rows = std::map<std::string, std::uint32_t>;

namespace {

constexpr std::uint32_t kBlockTokens = 4;
const Shape kShape{.num_blocks = 300, .block_tokens = kBlockTokens, .budget = 8};

/// A prompt of `num_shared` tokens that all siblings have, and `num_own` that no other has.
RequestSpec sibling(const std::string& label, std::uint32_t num_shared, std::uint32_t num_own, TokenId content,
                    std::int32_t priority = 0) {
    RequestSpec spec = spec_of(label, num_shared + num_own, 1, 1, kBlockTokens, priority);
    std::iota(spec.prompt.tokens.begin() + num_shared, spec.prompt.tokens.end(), content * 10'000);
    spec.prompt.chain = tokenspeed::kv_flat::KeyChain(kBlockTokens, {});
    spec.prompt.chain.extend(spec.prompt.tokens);
    return spec;
}

}  // namespace

TEST_CASE("of prompts that come together, one computes the common prefix and the others share it") {
    Bench bench(kShape);
    bench.add(sibling("first", 32, 8, 2));
    bench.add(sibling("second", 32, 6, 3));
    bench.add(sibling("third", 32, 2, 4));
    for (int step = 0; step < 5; ++step) {
        CHECK(bench.plan() == Rows{{"first", 8}});
        bench.advance();
    }
    CHECK(bench.plan() == Rows{{"second", 6}, {"third", 2}});
    CHECK(bench.scheduler.state().counters.num_cache_hit_tokens == 64);
}

TEST_CASE("a block that is half computed is waited for") {
    Bench bench({.num_blocks = 300, .block_tokens = kBlockTokens, .budget = 6});
    bench.add(sibling("first", 32, 8, 2));
    CHECK(bench.plan() == Rows{{"first", 6}});
    bench.advance();
    bench.add(sibling("second", 32, 6, 3));
    CHECK(bench.plan() == Rows{{"first", 6}});
}

TEST_CASE("a follower starts in the step that completes the common prefix") {
    Bench bench({.num_blocks = 300, .block_tokens = kBlockTokens, .budget = 64});
    bench.add(sibling("first", 32, 8, 2));
    bench.add(sibling("second", 32, 6, 3));
    CHECK(bench.plan() == Rows{{"first", 40}, {"second", 6}});
}

TEST_CASE("a follower whose leader goes away starts at once") {
    Bench bench(kShape);
    bench.add(sibling("first", 32, 8, 2));
    bench.add(sibling("second", 32, 6, 3));
    CHECK(bench.plan() == Rows{{"first", 8}});
    bench.advance();
    bench.scheduler.finish(bench.handle("first"), FinishReason::kAbort);
    CHECK(bench.plan() == Rows{{"second", 8}});
    CHECK(bench.scheduler.state().counters.num_cache_hit_tokens == 8);
}

TEST_CASE("nobody waits for one behind it, nor without reading the cache, nor for a prefix that is there") {
    SECTION("more urgent than the one that runs") {
        Shape shape = kShape;
        shape.policy = QueuePolicy::kPriority;
        Bench bench(shape);
        bench.add(sibling("runs", 32, 8, 2, 1));
        CHECK(bench.plan() == Rows{{"runs", 8}});
        bench.advance();
        bench.add(sibling("urgent", 32, 6, 3, 0));
        CHECK(bench.plan().contains("urgent"));
    }
    SECTION("every position has to be computed") {
        Bench bench(kShape);
        bench.add(sibling("runs", 32, 8, 2));
        RequestSpec spec = sibling("whole", 32, 6, 3);
        spec.may_read_cache = false;
        bench.add(std::move(spec));
        CHECK(bench.plan() == Rows{{"runs", 4}, {"whole", 4}});
    }
    SECTION("the rest is its own") {
        Bench bench(kShape);
        bench.add(sibling("runs", 8, 40, 2));
        CHECK(bench.plan() == Rows{{"runs", 8}});
        bench.advance();
        bench.add(sibling("late", 8, 3, 3));
        CHECK(bench.plan() == Rows{{"runs", 5}, {"late", 3}});
    }
}

TEST_CASE("a request that waits for its leader displaces nobody: it would not start") {
    Bench bench({.num_blocks = 24, .block_tokens = kBlockTokens, .budget = 8, .policy = QueuePolicy::kPriority});
    bench.add(sibling("first", 32, 8, 2));
    bench.add(sibling("second", 32, 6, 3));
    CHECK(bench.plan() == Rows{{"first", 8}});
    bench.advance();
    bench.add(sibling("patient", 0, 40, 4, 2));
    for (int step = 0; step < 6; ++step) {
        CHECK(bench.plan() == Rows{{"first", 4}, {"patient", 4}});
        bench.advance();
    }
    CHECK(bench.scheduler.state().counters.num_retractions == 0);
}
