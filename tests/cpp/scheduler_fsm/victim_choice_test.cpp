// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/victim_choice.h"

#include <catch2/catch.hpp>

#include "tests/cpp/scheduler_fsm/fixture.h"

using namespace tokenspeed::scheduler_fsm;
using namespace tokenspeed::scheduler_fsm::testing;

TEST_CASE("the cheapest request to restore goes, and the last one where all find their blocks again") {
    const bool prefix_caching = GENERATE(false, true);
    Bench bench({.num_blocks = 9, .block_tokens = 4, .budget = 64, .prefix_caching = prefix_caching});
    bench.add("first", 4, 20);
    bench.add("small", 8, 20);
    bench.add("large", 24, 20);
    CHECK(bench.plan().size() == 3);
    bench.advance();
    const auto rows = bench.plan();
    const std::string victim = prefix_caching ? "large" : "small";
    CHECK(bench.state(victim) == "Retracted");
    CHECK(rows.size() == 2);
    CHECK(rows.count(victim) == 0);
}

TEST_CASE("blocks that others own, too, are not counted as given") {
    Bench bench({.num_blocks = 40, .block_tokens = 4, .budget = 64});
    bench.add("first", 4, 20);
    bench.add("large", 24, 20);
    const auto submit_twin = [&bench](const char* label) {
        return std::get<RequestHandle>(bench.scheduler.submit(spec_of(label, 25, 20, 90, 4)));
    };
    submit_twin("twin");
    bench.plan();
    bench.advance();
    const RequestHandle last = submit_twin("last");  // adopts six blocks, owns one
    CHECK(bench.plan().at("last") == 1);
    bench.advance();
    static_cast<void>(bench.scheduler.plan({PauseLevel::kAll, false}));  // a step in which nobody has a row
    const EngineState& engine = bench.scheduler.state();
    const Request& first = *bench.scheduler.find(bench.handle("first"));
    CHECK(choose_victim(engine, first, 1)->label == "last");
    CHECK(choose_victim(engine, first, 3)->label == "large");
    CHECK(choose_victim(engine, first, 30)->label == "large");
    CHECK(choose_victim(engine, *bench.scheduler.find(last), 1) == nullptr);
}

TEST_CASE("a request with a row in this step is no victim") {
    Bench bench({.num_blocks = 40, .block_tokens = 4, .budget = 64});
    bench.add("first", 4, 20);
    bench.add("second", 4, 20);
    bench.plan();
    CHECK(choose_victim(bench.scheduler.state(), *bench.scheduler.find(bench.handle("first")), 1) == nullptr);
}

TEST_CASE("only the last few are candidates, however cheap an earlier one is") {
    Bench bench({.num_blocks = 100, .block_tokens = 4, .budget = 200, .max_num_seqs = 16, .prefix_caching = false});
    bench.add("first", 4, 20);
    bench.add("tiny", 1, 20);
    for (int i = 0; i < 8; ++i) bench.add(std::string("r").append(std::to_string(i)), 12, 20);
    bench.plan();
    bench.advance();
    static_cast<void>(bench.scheduler.plan({PauseLevel::kAll, false}));
    const Request& first = *bench.scheduler.find(bench.handle("first"));
    CHECK(choose_victim(bench.scheduler.state(), first, 1)->label == "r7");
}

TEST_CASE("another choice takes the place of the rule, among the same candidates") {
    Bench bench({.num_blocks = 40, .block_tokens = 4, .budget = 64});
    for (const char* label : {"first", "second", "third", "last"}) bench.add(label, 8, 20);
    bench.plan();
    bench.advance();
    static_cast<void>(bench.scheduler.plan({PauseLevel::kAll, false}));  // a step in which nobody has a row
    const Request& first = *bench.scheduler.find(bench.handle("first"));
    const EngineState& engine = bench.scheduler.state();
    CHECK(choose_victim(engine, first, 1)->label == "last");
    std::size_t answer = 1;
    std::vector<std::string> seen;
    bench.scheduler.set_victim_choice([&](std::span<const VictimCandidate> candidates, std::uint32_t num_missing) {
        seen.clear();
        for (const VictimCandidate& candidate : candidates) {
            seen.push_back(candidate.request->label);
            CHECK(candidate.num_freed_blocks <= num_missing);
        }
        return answer;
    });
    CHECK(choose_victim(engine, first, 2)->label == "third");
    CHECK(seen == std::vector<std::string>{"last", "third", "second"});
    answer = 3;
    CHECK_THROWS_WITH(choose_victim(engine, first, 2), Catch::Contains("answered 3") && Catch::Contains("below 3"));
    CHECK(choose_victim(engine, *bench.scheduler.find(bench.handle("last")), 1) == nullptr);
}
