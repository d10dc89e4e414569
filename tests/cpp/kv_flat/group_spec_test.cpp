// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/group_spec.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <deque>
#include <random>

using namespace tokenspeed::kv_flat;

namespace {

/// Most blocks that a sequence of `num_tokens` holds when it is computed in steps of at most `step_tokens`, of which
/// `num_steps` are in flight: blocks are taken when a step is planned, and left behind when its results are in.
std::uint32_t most_held(const GroupSpec& spec, std::uint32_t num_tokens, std::uint32_t step_tokens,
                        std::uint32_t num_steps, std::mt19937_64& random) {
    std::uint32_t planned = 0;
    std::uint32_t settled = 0;
    std::uint32_t most = 0;
    std::deque<std::uint32_t> in_flight;
    while (planned < num_tokens) {
        if (in_flight.size() == num_steps) {
            settled += in_flight.front();
            in_flight.pop_front();
        }
        const auto wanted = static_cast<std::uint32_t>(1 + random() % step_tokens);
        in_flight.push_back(std::min(wanted, num_tokens - planned));
        planned += in_flight.back();
        most = std::max(most, ceil_div(planned, spec.block_tokens) - spec.num_dead_blocks(settled));
    }
    return most;
}

}  // namespace

TEST_CASE("a group that reads back to its chunk holds what one chunk and the steps in flight cover") {
    const GroupSpec spec{"chunk", 4, Retention::kChunk, 16};
    std::mt19937_64 random(1);
    CHECK(most_held(spec, 12, 1, 1, random) == 3);   // short: what it has
    CHECK(most_held(spec, 400, 1, 1, random) == 4);  // one chunk, exactly
    CHECK(spec.num_dead_blocks(15) == 0);            // the last token of a chunk still reads its first
    CHECK(spec.num_dead_blocks(16) == 4);            // the first one of the next reads nothing before it
    CHECK(spec.max_held_blocks(400, 1) == 5);        // a bound, for chunks that begin inside a block, too
    CHECK(spec.max_held_blocks(12, 1) == 3);
    CHECK(spec.max_held_blocks(400, 8) == 7);
}

TEST_CASE("no group ever holds more blocks than it promises, and windows and chunks need all but one of them") {
    std::mt19937_64 random(7);
    std::uint32_t most_spared[] = {0, 0};
    for (int round = 0; round < 3000; ++round) {
        const bool is_chunk = random() % 2 == 0;
        const auto block = static_cast<std::uint32_t>(1 + random() % 8);
        const auto window = static_cast<std::uint32_t>(1 + random() % 40);
        const GroupSpec spec{"", block, is_chunk ? Retention::kChunk : Retention::kSlidingWindow, window};
        const auto num_tokens = static_cast<std::uint32_t>(1 + random() % 300);
        const auto step = static_cast<std::uint32_t>(1 + random() % 20);
        const auto num_steps = static_cast<std::uint32_t>(1 + random() % 3);
        const std::uint32_t held = most_held(spec, num_tokens, step, num_steps, random);
        const std::uint32_t promised = spec.max_held_blocks(num_tokens, step * num_steps);
        REQUIRE(held <= promised);
        if (step == 1 && num_steps == 1 && num_tokens > 250)
            most_spared[is_chunk] = std::max(most_spared[is_chunk], promised - held);
    }
    CHECK(most_spared[0] <= 1);
    CHECK(most_spared[1] <= 1);
}
