// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/block_residency.h"

#include <catch2/catch.hpp>

using namespace tokenspeed::kv_flat;

TEST_CASE("a block's life ends when it is taken again") {
    BlockResidency residency(1.0);
    residency.note_taken(1);
    residency.note_hit(1);
    residency.note_hit(2);  // nobody follows it
    CHECK(residency.drain().empty());
    residency.note_taken(1);
    const auto lives = residency.drain();
    REQUIRE(lives.size() == 1);
    CHECK(lives[0].lifetime_s >= lives[0].idle_s);
    CHECK(lives[0].idle_s >= 0.0);
    CHECK(lives[0].reuse_gaps_s.empty());
    CHECK(residency.drain().empty());
}

TEST_CASE("the gaps between the last four hits are kept") {
    for (const std::size_t num_hits : {0U, 1U, 2U, 4U, 7U}) {
        BlockResidency residency(1.0);
        residency.note_taken(1);
        for (std::size_t i = 0; i < num_hits; ++i) residency.note_hit(1);
        residency.note_taken(1);
        const auto lives = residency.drain();
        REQUIRE(lives.size() == 1);
        CHECK(lives[0].reuse_gaps_s.size() == (num_hits < 2 ? 0 : std::min<std::size_t>(num_hits, 4) - 1));
        for (const double gap : lives[0].reuse_gaps_s) CHECK(gap >= 0.0);
    }
}

TEST_CASE("a share of the blocks is followed, and a reset forgets them") {
    BlockResidency residency(0.25);
    for (BlockId block = 1; block <= 4000; ++block) residency.note_taken(block);
    for (BlockId block = 1; block <= 4000; ++block) residency.note_taken(block);
    const auto num_lives = residency.drain().size();
    CHECK(num_lives > 850);
    CHECK(num_lives < 1150);
    residency.forget_all();
    for (BlockId block = 1; block <= 4000; ++block) residency.note_taken(block);
    CHECK(residency.drain().empty());
}
