// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include "tests/cpp/scheduler_fsm/fixture.h"

using namespace tokenspeed::scheduler_fsm;
using namespace tokenspeed::scheduler_fsm::testing;

TEST_CASE("a bad event in the middle of a batch applies nothing") {
    Bench bench({.num_blocks = 20});
    for (const char* label : {"a", "b", "c"}) bench.add(label, 2, 5);
    bench.plan();
    const std::uint64_t step = bench.scheduler.state().step;
    const std::vector<TokenId> negative = {7, -1, 7};
    const std::vector<std::uint32_t> one_each = {0, 1, 2, 3};
    CHECK_THROWS_WITH(static_cast<void>(bench.scheduler.advance({step, negative, one_each})),
                      Catch::Contains("request b got token id -1"));
    const std::vector<TokenId> tokens = {7, 7, 7, 7};
    const std::vector<std::uint32_t> two_for_b = {0, 1, 3, 4};
    CHECK_THROWS_WITH(static_cast<void>(bench.scheduler.advance({step, tokens, two_for_b})),
                      Catch::Contains("request b got 2 tokens; at most 1"));
    const std::vector<std::uint32_t> short_offsets = {0, 4};
    CHECK_THROWS_WITH(static_cast<void>(bench.scheduler.advance({step, tokens, short_offsets})),
                      Catch::Contains("2 offsets"));
    for (const char* label : {"a", "b", "c"}) {
        CHECK(bench.scheduler.find(bench.handle(label))->num_output_tokens() == 0);
        CHECK(bench.scheduler.find(bench.handle(label))->num_in_flight_tokens == 2);
    }
    bench.advance();
    CHECK(bench.scheduler.find(bench.handle("b"))->num_output_tokens() == 1);
}

TEST_CASE("late and repeated results are counted and change nothing") {
    Bench bench({.num_blocks = 20});
    bench.add("a", 2, 5);
    bench.add("b", 2, 5);
    bench.plan();
    const std::uint64_t step = bench.scheduler.state().step;
    REQUIRE(bench.scheduler.finish(bench.handle("a"), FinishReason::kAbort));
    CHECK_FALSE(bench.scheduler.finish(bench.handle("a"), FinishReason::kAbort));
    bench.scheduler.release(bench.handle("a"));
    bench.advance();
    CHECK(bench.scheduler.state().counters.num_late_rows == 1);
    CHECK(bench.scheduler.find(bench.handle("b"))->num_output_tokens() == 1);
    CHECK(bench.scheduler.advance({step, {}, {}}).empty());
    CHECK(bench.scheduler.state().counters.num_unknown_steps == 1);
    CHECK(bench.scheduler.find(bench.handle("b"))->num_output_tokens() == 1);
}

TEST_CASE("an id that is used again does not inherit the old request's results") {
    Bench bench({.num_blocks = 20});
    bench.add("a", 2, 5);
    bench.plan();
    const std::uint64_t step = bench.scheduler.state().step;
    bench.scheduler.finish(bench.handle("a"), FinishReason::kAbort);
    bench.scheduler.release(bench.handle("a"));
    bench.add("a", 3, 5);
    const std::vector<TokenId> tokens = {9};
    const std::vector<std::uint32_t> offsets = {0, 1};
    CHECK(bench.scheduler.advance({step, tokens, offsets}).empty());
    CHECK(bench.scheduler.find(bench.handle("a"))->num_output_tokens() == 0);
}

TEST_CASE("a request that was retracted with a step in flight keeps its token and waits for it") {
    Bench bench({.num_blocks = 20, .async_scheduling = true});
    bench.add("a", 2, 5);
    bench.plan();
    bench.scheduler.retract_all();
    CHECK(bench.state("a") == "Retracted");
    CHECK(bench.scheduler.plan().rows.empty());
    const std::vector<TokenId> tokens = {9};
    const std::vector<std::uint32_t> offsets = {0, 1};
    CHECK(bench.scheduler.advance({1, tokens, offsets}).size() == 1);
    CHECK(bench.plan() == std::map<std::string, std::uint32_t>{{"a", 3}});
}

TEST_CASE("rejected drafts are computed again") {
    Bench bench({.num_blocks = 20, .num_drafts = 3});
    bench.add("a", 2, 20);
    bench.plan();
    bench.advance();
    const std::vector<TokenId> drafts = {1, 2, 3};
    bench.scheduler.set_drafts(bench.handle("a"), drafts);
    CHECK(bench.plan().at("a") == 4);
    const std::vector<TokenId> tokens = {1, 8};  // one accepted, then the model's own
    const std::vector<std::uint32_t> offsets = {0, 2};
    const auto deliveries = bench.scheduler.advance({bench.scheduler.state().step, tokens, offsets});
    REQUIRE(deliveries.size() == 1);
    CHECK(deliveries[0].num_accepted_drafts == 1);
    CHECK(bench.plan().at("a") == 1);
    CHECK(bench.scheduler.find(bench.handle("a"))->num_computed_tokens == 5);
}
