// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/token_log.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <numeric>

using namespace tokenspeed::scheduler_fsm;

TEST_CASE("a log of tokens reads like one row, whenever it is asked and however it grows") {
    for (std::size_t num_prompt = 0; num_prompt < 20; ++num_prompt) {
        for (std::size_t asked_every = 1; asked_every < 40; ++asked_every) {
            std::vector<TokenId> expected(num_prompt);
            std::iota(expected.begin(), expected.end(), 100);
            TokenLog log(expected);
            for (TokenId token = 0; token < 70; ++token) {
                log.push_back(token);
                expected.push_back(token);
                REQUIRE(log.size() == expected.size());
                REQUIRE(log.back() == token);
                if (expected.size() % asked_every == 0) REQUIRE(std::ranges::equal(log.all(), expected));
            }
            REQUIRE(std::ranges::equal(log.all(), expected));
        }
    }
}

TEST_CASE("a log of tokens is cut and appended to where it ends") {
    TokenLog log(std::vector<TokenId>{1, 2});
    log.push_back(3);
    log.push_back(4);
    log.pop_back();
    CHECK(log.back() == 3);
    log.append(std::vector<TokenId>{5, 6});
    log.push_back(7);
    CHECK(std::ranges::equal(log.all(), std::vector<TokenId>{1, 2, 3, 5, 6, 7}));
    CHECK(log.size() == 6);
}
