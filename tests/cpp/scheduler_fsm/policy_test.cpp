// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include "tests/cpp/scheduler_fsm/fixture.h"

using namespace tokenspeed::scheduler_fsm;
using namespace tokenspeed::scheduler_fsm::testing;

using Rows = std::map<std::string, std::uint32_t>;

TEST_CASE("a prompt that can never fit is refused alone, with both numbers") {
    Bench bench({.num_blocks = 8, .block_tokens = 4});
    auto outcome = bench.scheduler.submit(spec_of("big", 40, 1, 1, 4));
    REQUIRE(std::holds_alternative<Refusal>(outcome));
    CHECK(std::get<Refusal>(outcome).message ==
          "The prompt of 40 tokens needs 10 KV cache blocks; the whole cache has 8.");
    bench.add("small", 4, 1);
    CHECK(bench.plan() == Rows{{"small", 4}});
}

TEST_CASE("decodes come first, prompts share the rest") {
    Bench bench({.num_blocks = 60, .budget = 8});
    bench.add("a", 4, 20);
    bench.plan();
    bench.advance();
    bench.add("long", 40, 1);
    CHECK(bench.plan() == Rows{{"a", 1}, {"long", 7}});
}

TEST_CASE("a short prompt behind a long one starts at once, and the long one keeps half") {
    Bench bench({.num_blocks = 300, .budget = 8});
    bench.add("long", 800, 1);
    CHECK(bench.plan() == Rows{{"long", 8}});
    bench.advance();
    bench.add("short", 4, 1);
    CHECK(bench.plan() == Rows{{"long", 4}, {"short", 4}});
}

TEST_CASE("a stream of short prompts cannot starve a long one") {
    Bench bench({.num_blocks = 300, .budget = 8, .max_num_seqs = 64, .prefix_caching = false});
    bench.add("long", 200, 1);
    std::uint32_t num_steps = 0;
    for (bool done = false; !done; ++num_steps) {
        REQUIRE(num_steps < 60);
        bench.add("short" + std::to_string(num_steps), 6, 1);
        bench.plan();
        const auto finished = bench.advance();
        done = std::ranges::find(finished, "long") != finished.end();
    }
    CHECK(num_steps <= 52);
}

TEST_CASE("where a step has room for the row of one prompt, the more urgent one goes on") {
    const auto budget = GENERATE(1U, 3U);
    // Of three inputs a row of the drafter's takes one, so that two rows have no room.
    Bench bench({.num_blocks = 300,
                 .budget = budget,
                 .policy = QueuePolicy::kPriority,
                 .num_drafts = budget == 3 ? 1U : 0U,
                 .drafter_slots = budget == 3 ? 1U : 0U});
    bench.add("patient", 4, 1, 2);
    bench.add("urgent", 20, 1);
    const std::uint32_t tokens = budget == 3 ? 2 : 1;
    for (std::uint32_t computed = 0; computed < 20; computed += tokens) {
        CHECK(bench.plan() == Rows{{"urgent", tokens}});
        bench.advance();
    }
    CHECK(bench.plan() == Rows{{"patient", tokens}});
}

TEST_CASE("one that does not fit is passed over, and gets its turn within a bound") {
    Bench bench({.num_blocks = 10, .block_tokens = 4, .budget = 64, .max_num_seqs = 8, .prefix_caching = false});
    bench.add("running", 20, 400);
    bench.plan();
    bench.advance();
    bench.add("heavy", 32, 1);
    std::uint32_t num_overtaken = 0;
    for (int i = 0; i < 200; ++i) {
        bench.add("light" + std::to_string(i), 4, 1);
        const Rows rows = bench.plan();
        num_overtaken += rows.contains("light" + std::to_string(i));
        bench.advance();
        if (bench.state("running") != "gone" && i == 100)
            bench.scheduler.finish(bench.handle("running"), FinishReason::kAbort);
        if (rows.contains("heavy")) break;
    }
    CHECK(num_overtaken > 0);
    CHECK(num_overtaken <= 65);
    CHECK(bench.state("heavy") == "gone");
}

TEST_CASE("a decode that lacks a block takes it from the last in the order, never from an older one") {
    Bench bench({.num_blocks = 4, .block_tokens = 4, .budget = 16, .prefix_caching = false});
    bench.add("old", 8, 8);
    bench.add("new", 7, 8);
    bench.plan();
    bench.advance();
    CHECK(bench.plan() == Rows{{"old", 1}});
    CHECK(bench.state("new") == "Retracted");
    while (bench.state("new") != "gone") {
        bench.advance();
        bench.plan();
        REQUIRE(bench.scheduler.state().step < 60);
    }
    CHECK(bench.scheduler.state().counters.num_retractions == 1);
}

TEST_CASE("a strictly more urgent request displaces a running one, an equal one does not") {
    Bench bench({.num_blocks = 40, .max_num_seqs = 2, .policy = QueuePolicy::kPriority});
    bench.add("x", 4, 50, 5);
    bench.add("y", 4, 50, 5);
    bench.plan();
    bench.advance();
    bench.add("equal", 4, 2, 5);
    CHECK(bench.plan() == Rows{{"x", 1}, {"y", 1}});
    bench.advance();
    bench.add("urgent", 4, 2, 0);
    CHECK(bench.plan() == Rows{{"urgent", 4}, {"x", 1}});
    CHECK(bench.state("y") == "Retracted");
}

TEST_CASE("with more decodes than budget everybody still advances") {
    Bench bench({.num_blocks = 60, .budget = 4, .max_num_seqs = 8});
    for (int i = 0; i < 7; ++i) bench.add("r" + std::to_string(i), 2, 100);
    std::map<std::string, int> served;
    for (int step = 0; step < 60; ++step) {
        for (const auto& [label, count] : bench.plan()) served[label] += static_cast<int>(count);
        bench.advance();
    }
    REQUIRE(served.size() == 7);
    for (const auto& [label, count] : served) {
        INFO(label);
        CHECK(count >= 20);
    }
}

TEST_CASE("a request that fills the pool alone ends by length") {
    Bench bench({.num_blocks = 3, .block_tokens = 4, .budget = 16});
    bench.add("a", 10, 500);
    std::vector<Request*> ended;
    for (int step = 0; step < 10 && ended.empty(); ++step) {
        ended = bench.scheduler.plan().ended;
        if (!ended.empty()) break;
        const std::vector<TokenId> tokens = {7};
        const std::vector<std::uint32_t> offsets = {0, 1};
        static_cast<void>(bench.scheduler.advance({bench.scheduler.state().step, tokens, offsets}));
    }
    REQUIRE(ended.size() == 1);
    CHECK(ended[0]->num_known_tokens() == 13);
    bench.scheduler.check_integrity();
}

TEST_CASE("settings that make no sense are refused by name") {
    SchedulerConfig config = config_of({});
    config.watermark = 1.5;
    CHECK_THROWS_WITH(Scheduler(config), Catch::Contains("SchedulerConfig.watermark is 1.5"));
    config = config_of({});
    config.max_num_seqs = 0;
    CHECK_THROWS_WITH(Scheduler(config), Catch::Contains("max_num_seqs is 0"));
}
