// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/session_eviction.h"

#include <catch2/catch.hpp>
#include <memory>
#include <vector>

#include "kv_flat/csrc/block_pool.h"
#include "kv_flat/csrc/block_table.h"

using namespace tokenspeed::kv_flat;

namespace {

using Ids = std::vector<BlockId>;

Digest key_of(BlockId value) {
    Digest digest;
    digest.bytes[0] = static_cast<std::uint8_t>(value);
    return digest;
}

SessionHints named(std::uint64_t session) {
    SessionHints hints;
    hints.session = session;
    return hints;
}

Departure answer(std::uint32_t num_prompt_tokens, std::uint32_t num_output_tokens, SessionHints hints = {}) {
    return {num_prompt_tokens, num_output_tokens, hints};
}

/// A pool of cached blocks that sequences leave behind.
class Fixture {
  public:
    explicit Fixture(std::uint32_t num_blocks, const EvictionSpec& spec = {}) : pool(num_blocks, false, 1, spec) {}

    /// A sequence adopts `shared`, takes `num_new` blocks, and leaves at once.
    void leave(double now_s, const Departure& departure, std::uint32_t num_new, const Ids& shared = {}) {
        pool.set_time(now_s);
        auto table = std::make_unique<BlockTable>(pool);
        for (const BlockId block : shared) table->append(pool.share(block));
        pool.settle(departure.hints.session);
        for (std::uint32_t i = 0; i < num_new; ++i) {
            BlockRef block = pool.take();
            REQUIRE(pool.publish(block.id(), key_of(block.id()), 0));
            table->append(std::move(block));
        }
        const auto leaving = pool.open_run(departure);
        table.reset();
    }

    /// Who goes next, blank blocks left out.
    Ids order() const {
        Ids order = pool.free_order();
        order.erase(order.begin(), order.begin() + pool.num_blank());
        return order;
    }

    std::uint64_t num_evicted(EvictionKind kind) const {
        return pool.num_evictions_by_kind()[static_cast<std::size_t>(kind)];
    }

    BlockPool pool;
};

SessionHints back_in(double seconds) {
    SessionHints hints;
    hints.return_in_s = seconds;
    return hints;
}

}  // namespace

TEST_CASE("runs with equal scales go least recently released first, tail before head") {
    Fixture fixture(7);
    fixture.leave(1.0, answer(100, 10), 3);
    fixture.leave(2.0, answer(100, 10), 2);
    CHECK(fixture.order() == Ids{3, 2, 1, 5, 4});
    fixture.pool.check_integrity(std::vector<std::uint32_t>(7));
}

TEST_CASE("a long answer to a long prompt takes its reader longer, so it is given up before an older short one") {
    Fixture fixture(7);
    fixture.leave(0.0, answer(1'000, 10), 1);
    fixture.leave(1.0, answer(100'000, 800), 1);
    // Scales: 18 s * sqrt(11/200) * 0.01^0.4 is under 1 s; 18 s * sqrt(801/200) is 36 s.
    CHECK(fixture.order() == Ids{2, 1});
    fixture.leave(40.0, answer(1'000, 10), 1);
    CHECK(fixture.order() == Ids{2, 1, 3});
}

TEST_CASE("the tail that a later turn of the session left behind goes first") {
    Fixture fixture(9);
    fixture.leave(1.0, answer(100, 10, named(5)), 2);
    fixture.leave(2.0, answer(100, 10, named(7)), 3);
    fixture.leave(3.0, answer(100, 10, named(7)), 1, {3});  // took the head only: 4 and 5 are left behind
    CHECK(fixture.order() == Ids{5, 4, 2, 1, 6, 3});
    for (int i = 0; i < 4; ++i) static_cast<void>(BlockRef(fixture.pool.take()));
    const CountsByKind idle = fixture.pool.num_idle_blocks();
    CHECK(idle[static_cast<std::size_t>(EvictionKind::kSuperseded)] == 2);
}

TEST_CASE("another session that shares a head supersedes nothing, and the head outlives both") {
    Fixture fixture(9);
    fixture.leave(1.0, answer(100, 10, named(5)), 3);
    fixture.leave(2.0, answer(100, 10, named(7)), 1, {1});
    // The head has no scale of its own: it counts as released now, behind both tails.
    CHECK(fixture.order() == Ids{3, 2, 4, 1});
    CHECK(fixture.pool.num_idle_blocks()[static_cast<std::size_t>(EvictionKind::kSuperseded)] == 0);
}

TEST_CASE("without names a tail left behind is taken to be superseded only while such guesses come true") {
    Fixture fixture(200);
    for (BlockId round = 0; round < 70; ++round) {
        // Two conversations take turns on one head; each comes back for the tail that the other seemed to supersede.
        const double now_s = 10.0 * round;
        if (round == 0)
            fixture.leave(now_s, answer(100, 10), 3);
        else if (round == 1)
            fixture.leave(now_s, answer(100, 10), 2, {1});
        else
            fixture.leave(now_s, answer(100, 10), 0, round % 2 == 0 ? Ids{1, 2, 3} : Ids{1, 4, 5});
    }
    CHECK(fixture.pool.num_idle_blocks()[static_cast<std::size_t>(EvictionKind::kSuperseded)] == 0);
}

TEST_CASE("a session that ended goes before everything else, but not the head that others share") {
    Fixture fixture(9);
    fixture.leave(1.0, answer(100, 10, named(1)), 2);
    SessionHints last = named(2);
    last.ends = true;
    fixture.leave(2.0, answer(100, 10, last), 2, {1});
    CHECK(fixture.order() == Ids{4, 3, 2, 1});
    CHECK(fixture.pool.num_idle_blocks()[static_cast<std::size_t>(EvictionKind::kEnded)] == 2);
}

TEST_CASE("who is expected back later goes earlier, and an overdue session ages from when it was due") {
    Fixture fixture(9);
    fixture.leave(0.0, answer(100, 10, back_in(30.0)), 1);
    fixture.leave(0.0, answer(100, 10, back_in(600.0)), 1);
    fixture.leave(0.0, answer(0, 0), 1);
    CHECK(fixture.order() == Ids{2, 1, 3});
    fixture.pool.set_time(100.0);  // 3 was released 100 s ago, 1 was due 70 s ago, 2 comes in 500 s
    static_cast<void>(BlockRef(fixture.pool.take()));
    CHECK(fixture.pool.num_evictions() == 0);  // blank blocks first
    for (int i = 0; i < 5; ++i) fixture.leave(100.0, answer(0, 0), 1);
    const Ids order = fixture.order();
    CHECK(Ids(order.begin(), order.begin() + 3) == Ids{2, 3, 1});
}

TEST_CASE("a pinned run goes last, for a bounded time, and pins do not cover the pool") {
    Fixture fixture(17);
    SessionHints pin;
    pin.pin_s = 50.0;
    fixture.leave(0.0, answer(0, 0, pin), 2);
    fixture.leave(1.0, answer(0, 0), 2);
    CHECK(fixture.order() == Ids{4, 3, 2, 1});
    fixture.leave(2.0, answer(0, 0, pin), 3);  // five pinned blocks would be more than a quarter of the pool
    CHECK(fixture.order() == Ids{4, 3, 7, 6, 5, 2, 1});
    fixture.leave(51.0, answer(0, 0), 10);  // takes the blank ones and one more: the pin has run out, 2 is the oldest
    const Ids order = fixture.order();
    CHECK(Ids(order.begin(), order.begin() + 3) == Ids{1, 4, 3});
    CHECK(fixture.num_evicted(EvictionKind::kIdle) == 1);
}

TEST_CASE("a pin outlives those who use what it keeps") {
    Fixture fixture(17);
    SessionHints pin;
    pin.pin_s = 50.0;
    fixture.leave(0.0, answer(0, 0, pin), 2);
    fixture.leave(1.0, answer(0, 0), 2, {1, 2});
    fixture.leave(2.0, answer(0, 0), 1, {1});
    CHECK(fixture.order() == Ids{4, 3, 5, 2, 1});
    fixture.pool.check_integrity(std::vector<std::uint32_t>(17));
    fixture.leave(60.0, answer(0, 0), 11);  // nothing blank is left; 4 is the oldest, what was pinned was used last
    fixture.leave(60.0, answer(0, 0), 1);
    CHECK(fixture.pool.find(key_of(1), 0) == 1);
    CHECK(fixture.pool.find(key_of(2), 0) == 2);
}

TEST_CASE("pinned blocks are there when nothing else is") {
    Fixture fixture(9);
    SessionHints pin;
    pin.pin_s = 50.0;
    fixture.leave(0.0, answer(0, 0, pin), 2);
    std::vector<BlockRef> held;
    for (int i = 0; i < 8; ++i) held.push_back(fixture.pool.take());
    CHECK(fixture.num_evicted(EvictionKind::kPinned) == 2);
    CHECK(fixture.pool.num_free() == 0);
}

TEST_CASE("hints and superseded tails can be left out of account") {
    EvictionSpec spec;
    spec.use_hints = false;
    spec.superseded_first = false;
    spec.idle_scale_s = 0.0;
    Fixture fixture(9, spec);
    fixture.leave(0.0, answer(1'000, 10, named(1)), 3);
    fixture.leave(1.0, answer(1'000, 10, back_in(500.0)), 1);
    fixture.leave(2.0, answer(1'000, 10, named(1)), 1, {1});
    CHECK(fixture.order() == Ids{3, 2, 4, 5, 1});
}

TEST_CASE("evicted keys are remembered until the cache is reset") {
    Fixture fixture(3);
    fixture.leave(0.0, answer(0, 0), 2);
    CHECK_FALSE(fixture.pool.was_evicted(key_of(2), 0));
    static_cast<void>(BlockRef(fixture.pool.take()));
    CHECK(fixture.pool.was_evicted(key_of(2), 0));
    CHECK_FALSE(fixture.pool.was_evicted(key_of(2), 1));
    REQUIRE(fixture.pool.clear_cache());
    CHECK_FALSE(fixture.pool.was_evicted(key_of(2), 0));
}

TEST_CASE("a policy that does not exist and weights out of range are named") {
    EvictionSpec spec;
    spec.name = "random";
    CHECK_THROWS_WITH(BlockPool(3, false, 1, spec), Catch::Contains("EvictionSpec.name is \"random\""));
    spec = {};
    spec.output_exponent = -1.0;
    CHECK_THROWS_WITH(BlockPool(3, false, 1, spec), Catch::Contains("EvictionSpec.output_exponent is -1"));
}
