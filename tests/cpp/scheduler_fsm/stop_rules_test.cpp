// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/stop_rules.h"

#include <catch2/catch.hpp>

using namespace tokenspeed::scheduler_fsm;

namespace {

StopRules rules(std::uint32_t max_tokens) {
    StopRules stop;
    stop.max_tokens = max_tokens;
    return stop;
}

// A prompt of that length, and the output behind it.
TokenLog after(std::size_t num_prompt_tokens, const std::vector<TokenId>& output) {
    TokenLog tokens(std::vector<TokenId>(num_prompt_tokens, 7));
    for (const TokenId token : output) tokens.push_back(token);
    return tokens;
}

}  // namespace

TEST_CASE("the end-of-sequence token stops without naming itself, a stop token names itself") {
    StopRules stop = rules(10);
    stop.eos_token = 2;
    stop.stop_tokens = {5};
    const std::vector<TokenId> eos = {9, 2};
    const std::vector<TokenId> stopped = {9, 5};
    const std::vector<TokenId> open = {2, 9};
    CHECK(check_stop(stop, after(2, eos), 2, 100)->reason == FinishReason::kStop);
    CHECK_FALSE(check_stop(stop, after(2, eos), 2, 100)->token);
    CHECK(check_stop(stop, after(2, stopped), 2, 100)->token == 5);
    CHECK_FALSE(check_stop(stop, after(2, open), 2, 100));
}

TEST_CASE("length ends at max_tokens and at the model's context") {
    const std::vector<TokenId> output = {1, 2, 3};
    CHECK(check_stop(rules(3), after(2, output), 2, 100)->reason == FinishReason::kLength);
    CHECK(check_stop(rules(9), after(97, output), 97, 100)->reason == FinishReason::kLength);
    CHECK_FALSE(check_stop(rules(4), after(96, output), 96, 100));
}

TEST_CASE("repetition counts patterns of any allowed length, after min_tokens") {
    StopRules stop = rules(50);
    stop.repetition = {1, 2, 3};
    const std::vector<TokenId> single = {4, 7, 7, 7};
    const std::vector<TokenId> pair = {1, 2, 1, 2, 1, 2};
    const std::vector<TokenId> broken = {1, 2, 1, 3, 1, 2};
    CHECK(check_stop(stop, after(5, single), 5, 100)->reason == FinishReason::kRepetition);
    CHECK(check_stop(stop, after(3, pair), 3, 100)->reason == FinishReason::kRepetition);
    CHECK_FALSE(check_stop(stop, after(3, broken), 3, 100));
    stop.min_tokens = 10;
    CHECK_FALSE(check_stop(stop, after(3, pair), 3, 100));
}
