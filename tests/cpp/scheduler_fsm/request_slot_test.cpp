// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/request_slot.h"

#include <catch2/catch.hpp>

using namespace tokenspeed::scheduler_fsm;

TEST_CASE("moving over a live slot gives the old one back, a thousand times") {
    SlotPool pool(3);
    RequestSlot slot = pool.take();
    for (int i = 0; i < 1000; ++i) {
        slot = pool.take();
        REQUIRE(pool.num_free() == 2);
    }
    RequestSlot& self = slot;
    slot = std::move(self);
    CHECK(pool.num_free() == 2);
}
