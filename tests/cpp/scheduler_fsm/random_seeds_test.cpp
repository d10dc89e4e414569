// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>
#include <cstdlib>

#include "tests/cpp/scheduler_fsm/random_world.h"

using namespace tokenspeed::scheduler_fsm::testing;

namespace {

std::uint32_t environment_or(const char* name, std::uint32_t fallback) {
    const char* text = std::getenv(name);
    return text == nullptr ? fallback : static_cast<std::uint32_t>(std::strtoul(text, nullptr, 10));
}

}  // namespace

// TOKENSPEED_FIRST_SEED and TOKENSPEED_NUM_SEEDS search further, or repeat one seed that failed.
TEST_CASE("random events never lose, double or falsify a token, and every request ends") {
    const std::uint32_t first = environment_or("TOKENSPEED_FIRST_SEED", 1);
    const std::uint32_t count = environment_or("TOKENSPEED_NUM_SEEDS", 300);
    std::uint32_t num_finished = 0;
    std::uint64_t num_copies = 0;
    std::uint64_t num_hit_states = 0;
    for (std::uint32_t seed = first; seed < first + count; ++seed) {
        INFO("seed " << seed);
        World world{Dice(seed)};
        world.run();
        num_finished += world.num_finished();
        num_copies += world.num_copies();
        num_hit_states += world.has_states() && world.num_hit_tokens() > 0;
    }
    CHECK(num_finished > count);
    CHECK(num_copies > count);
    CHECK(num_hit_states > count / 10);
}
