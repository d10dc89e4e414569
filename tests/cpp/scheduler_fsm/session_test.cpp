// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <catch2/catch.hpp>
#include <stdexcept>

#include "tests/cpp/scheduler_fsm/fixture.h"

using namespace tokenspeed::scheduler_fsm;
using namespace tokenspeed::scheduler_fsm::testing;

namespace {

RequestSpec session_of(std::uint32_t num_prompt, std::uint32_t max_tokens) {
    RequestSpec spec = spec_of("session", num_prompt, max_tokens, 1, 4);
    spec.is_session = true;
    return spec;
}

TurnInput input_of(std::vector<TokenId> tokens, std::uint32_t max_tokens) {
    TurnInput input;
    input.tokens = std::move(tokens);
    input.stop.max_tokens = max_tokens;
    return input;
}

/// Plans one step and gives every row that samples the token 7.
void step(Scheduler& scheduler) {
    std::vector<TokenId> tokens;
    std::vector<std::uint32_t> offsets = {0};
    const ExecutionPlan& plan = scheduler.plan();
    for (const PlanRow& row : plan.rows) {
        if (row.samples) tokens.push_back(7);
        offsets.push_back(static_cast<std::uint32_t>(tokens.size()));
    }
    if (!plan.rows.empty()) static_cast<void>(scheduler.advance({plan.step, tokens, offsets}));
    scheduler.check_integrity();
}

}  // namespace

TEST_CASE("a session is idle between two turns, and its last sampled token is not kept") {
    Scheduler scheduler(config_of({}));
    const auto handle = std::get<RequestHandle>(scheduler.submit(session_of(5, 2)));
    step(scheduler);
    step(scheduler);
    const Request& session = *scheduler.find(handle);
    CHECK(session.is_idle());
    CHECK(scheduler.num_running() == 0);
    CHECK(scheduler.num_waiting() == 1);
    CHECK(session.num_known_tokens() == 7);
    CHECK(session.num_computed_tokens == 6);

    REQUIRE_FALSE(scheduler.feed(handle, input_of({40, 41}, 1)).has_value());
    CHECK(session.is_prefilling());
    CHECK(session.num_prompt_tokens == 8);
    CHECK(std::ranges::equal(session.tokens.all().last(3), std::vector<TokenId>{7, 40, 41}));
    CHECK(session.num_pending_tokens() == 2);
    step(scheduler);
    CHECK(session.is_idle());
    CHECK(scheduler.finish(handle, FinishReason::kAbort));
    scheduler.release(handle);
    CHECK(scheduler.state().num_awaiting_input == 0);
    CHECK(scheduler.reset_prefix_cache());
}

TEST_CASE("results of a turn that is over are dropped") {
    Scheduler scheduler(config_of({.async_scheduling = true}));
    auto spec = session_of(5, 4);
    spec.stop.stop_tokens = {7};
    const auto handle = std::get<RequestHandle>(scheduler.submit(std::move(spec)));
    const std::uint64_t first = scheduler.plan().step;
    const std::uint64_t second = scheduler.plan().step;
    const std::vector<TokenId> token = {7};
    const std::vector<std::uint32_t> offsets = {0, 1};
    CHECK(scheduler.advance({first, token, offsets}).size() == 1);
    const Request& session = *scheduler.find(handle);
    CHECK(session.is_idle());
    CHECK(session.num_in_flight_tokens == 1);
    REQUIRE_FALSE(scheduler.feed(handle, input_of({40}, 4)).has_value());
    CHECK(scheduler.advance({second, token, offsets}).empty());
    CHECK(session.num_in_flight_tokens == 0);
    CHECK(session.tokens.back() == 40);
    static_cast<void>(scheduler.finish(handle, FinishReason::kAbort));
    scheduler.release(handle);
}

TEST_CASE("input is refused whole: empty, too long, or not asked for") {
    Scheduler scheduler(config_of({.num_blocks = 4}));
    const auto handle = std::get<RequestHandle>(scheduler.submit(session_of(5, 1)));
    CHECK_THROWS_AS(scheduler.feed(handle, input_of({1}, 1)), std::invalid_argument);
    step(scheduler);
    CHECK_THROWS_WITH(scheduler.feed(handle, input_of({}, 1)), Catch::Contains("session got empty input"));
    const auto refusal = scheduler.feed(handle, input_of(std::vector<TokenId>(12, 3), 1));
    REQUIRE(refusal.has_value());
    CHECK_THAT(refusal->message, Catch::Contains("17 tokens needs 5 KV cache blocks; the whole cache has 4"));
    CHECK(scheduler.find(handle)->is_idle());
    static_cast<void>(scheduler.finish(handle, FinishReason::kAbort));
    scheduler.release(handle);
}

TEST_CASE("the longest idle session gives way first, and only when that helps") {
    Scheduler scheduler(config_of({.num_blocks = 8, .budget = 64, .prefix_caching = false}));
    std::vector<RequestHandle> sessions;
    for (TokenId content = 1; content <= 2; ++content) {
        auto spec = spec_of("s" + std::to_string(content), 8, 1, content, 4);
        spec.is_session = true;
        sessions.push_back(std::get<RequestHandle>(scheduler.submit(std::move(spec))));
        step(scheduler);
    }
    const auto running = std::get<RequestHandle>(scheduler.submit(spec_of("running", 8, 9, 3, 4)));
    step(scheduler);
    const auto large = std::get<RequestHandle>(scheduler.submit(spec_of("large", 30, 1, 4, 4)));
    step(scheduler);
    CHECK(scheduler.find(sessions[0])->is_idle());  // 8 blocks are not to be had while the other runs
    static_cast<void>(scheduler.finish(large, FinishReason::kAbort));
    const auto small = std::get<RequestHandle>(scheduler.submit(spec_of("small", 12, 1, 5, 4)));
    step(scheduler);
    CHECK(state_name(scheduler.find(sessions[0])->state) == "Retracted");
    CHECK(scheduler.find(sessions[1])->is_idle());
    for (const RequestHandle handle : {sessions[0], sessions[1], running, small}) {
        static_cast<void>(scheduler.finish(handle, FinishReason::kAbort));
    }
}
