// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/block_pool.h"

#include <catch2/catch.hpp>
#include <vector>

#include "kv_flat/csrc/block_table.h"

using namespace tokenspeed::kv_flat;

namespace {

Digest key_of(std::uint8_t value) {
    Digest digest;
    digest.bytes[0] = value;
    return digest;
}

using Ids = std::vector<BlockId>;

}  // namespace

TEST_CASE("blocks are served in order, and the null block never") {
    BlockPool pool(4, false);
    const BlockRef a = pool.take();
    const BlockRef b = pool.take();
    const BlockRef c = pool.take();
    CHECK(a.id() == 1);
    CHECK(b.id() == 2);
    CHECK(c.id() == 3);
    CHECK(pool.num_free() == 0);
}

TEST_CASE("cached blocks are evicted last, least recently released first") {
    BlockPool pool(5, true);
    {
        BlockTable table(pool);
        for (int i = 0; i < 4; ++i) table.append(pool.take());
        REQUIRE(pool.publish(2, key_of(2), 0));
        REQUIRE(pool.publish(3, key_of(3), 0));
    }
    // Released tail first: 4 and 1 are blank and stand in front, 3 before 2 behind them.
    CHECK(pool.free_order() == Ids{1, 4, 3, 2});
    {
        const BlockRef hit = pool.share(3);
        CHECK(pool.free_order() == Ids{1, 4, 2});
    }
    CHECK(pool.free_order() == Ids{1, 4, 2, 3});
    const BlockRef a = pool.take();
    const BlockRef b = pool.take();
    const BlockRef evicted = pool.take();
    CHECK(evicted.id() == 2);
    CHECK(pool.find(key_of(2), 0) == kNullBlock);
    CHECK(pool.num_evictions() == 1);
    const auto events = pool.events().drain();
    REQUIRE(events.size() == 1);
    CHECK(events[0].kind == KvEvent::Kind::kRemoved);
    CHECK(events[0].key == key_of(2));
}

TEST_CASE("a shared block comes back when its last owner lets go, once") {
    BlockPool pool(3, false);
    BlockRef first = pool.take();
    {
        BlockRef second = pool.share(first.id());
        CHECK(pool.num_owners(1) == 2);
        BlockRef moved = std::move(second);
        CHECK(pool.num_owners(1) == 2);
    }
    CHECK(pool.num_owners(1) == 1);
    first = pool.take();  // moving over a live handle releases what it held
    CHECK(pool.num_owners(1) == 0);
    CHECK(pool.num_in_use() == 1);
}

TEST_CASE("two blocks with the same content: the second stays private") {
    BlockPool pool(3, false);
    const BlockRef a = pool.take();
    const BlockRef b = pool.take();
    CHECK(pool.publish(a.id(), key_of(1), 0));
    CHECK_FALSE(pool.publish(b.id(), key_of(1), 0));
    CHECK(pool.publish(b.id(), key_of(1), 1));
    CHECK(pool.find(key_of(1), 0) == a.id());
}

TEST_CASE("the cache is cleared only when nothing is in use, and says so once") {
    BlockPool pool(3, true);
    {
        const BlockRef held = pool.take();
        REQUIRE(pool.publish(held.id(), key_of(1), 0));
        CHECK_FALSE(pool.clear_cache());
        CHECK(pool.num_cached() == 1);
    }
    CHECK(pool.clear_cache());
    CHECK(pool.num_cached() == 0);
    REQUIRE(pool.events().drain().size() == 1);
}

TEST_CASE("a retired column reads as the null block and is given back once") {
    BlockPool pool(4, false);
    BlockTable table(pool);
    for (int i = 0; i < 3; ++i) table.append(pool.take());
    table.retire(0);
    table.retire(0);
    CHECK(table.ids()[0] == kNullBlock);
    CHECK(table.num_held() == 2);
    CHECK(pool.num_free() == 1);
}

TEST_CASE("the integrity check names what is wrong") {
    BlockPool pool(3, false);
    const BlockRef held = pool.take();
    CHECK_NOTHROW(pool.check_integrity({0, 1, 0}));
    CHECK_THROWS_WITH(pool.check_integrity({0, 0, 0}), Catch::Contains("block 1 counts 1 owners, has 0"));
}

TEST_CASE("a pool without a block for use is refused") {
    CHECK_THROWS_WITH(BlockPool(1, false), Catch::Contains("num_blocks is 1"));
}
