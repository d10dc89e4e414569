// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/prefix_index.h"

#include <catch2/catch.hpp>
#include <map>
#include <random>

using namespace tokenspeed::kv_flat;

namespace {

// Few leading bits, so that probes run long and deletions close holes across runs.
Digest crowded(std::uint64_t value) {
    Digest digest;
    digest.bytes[0] = static_cast<std::uint8_t>(value % 3);
    digest.bytes[20] = static_cast<std::uint8_t>(value);
    digest.bytes[21] = static_cast<std::uint8_t>(value >> 8U);
    return digest;
}

}  // namespace

TEST_CASE("the index agrees with a map under random insertions and erasures") {
    constexpr std::uint32_t kNumBlocks = 64;
    std::mt19937_64 random(11);
    PrefixIndex index(kNumBlocks);
    std::map<std::pair<std::uint64_t, GroupId>, BlockId> model;
    std::map<BlockId, std::pair<std::uint64_t, GroupId>> held;
    for (int round = 0; round < 20'000; ++round) {
        const auto block = static_cast<BlockId>(1 + random() % (kNumBlocks - 1));
        const std::uint64_t value = random() % 200;
        const auto group = static_cast<GroupId>(random() % 2);
        if (held.contains(block)) {
            model.erase(held.at(block));
            held.erase(block);
            index.erase(block);
        } else {
            const bool is_new = !model.contains({value, group});
            REQUIRE(index.insert(crowded(value), group, block) == is_new);
            if (is_new) {
                model[{value, group}] = block;
                held[block] = {value, group};
            }
        }
        const std::uint64_t probe = random() % 200;
        const auto found = model.find({probe, group});
        REQUIRE(index.find(crowded(probe), group) == (found == model.end() ? kNullBlock : found->second));
        REQUIRE(index.size() == model.size());
    }
    index.clear();
    CHECK(index.size() == 0);
    for (const auto& [key, block] : model) CHECK(index.find(crowded(key.first), key.second) == kNullBlock);
}

TEST_CASE("keys that share all leading bits are still different keys") {
    PrefixIndex index(8);
    REQUIRE(index.insert(crowded(0), 0, 1));
    CHECK(index.find(crowded(3), 0) == kNullBlock);
    CHECK(index.find(crowded(0), 1) == kNullBlock);
    CHECK(index.find(crowded(0), 0) == 1);
}

TEST_CASE("a run of lookups ends where single ones find nothing") {
    constexpr std::uint32_t kNumBlocks = 400;
    std::mt19937_64 random(23);
    for (int round = 0; round < 50; ++round) {
        PrefixIndex index(kNumBlocks);
        std::vector<Digest> keys;
        for (std::uint32_t i = 0; i < 300; ++i) {
            keys.push_back(crowded(random()));
            if (random() % 60 != 0) index.insert(keys.back(), 1, 1 + i);
        }
        const std::size_t stride = 1 + random() % 3;
        const std::size_t first = random() % stride;
        const std::size_t count = (keys.size() - first) / stride;
        std::vector<BlockId> expected;
        for (std::size_t i = 0; i < count && index.find(keys[first + i * stride], 1) != kNullBlock; ++i)
            expected.push_back(index.find(keys[first + i * stride], 1));
        std::vector<BlockId> found;
        index.find_run(keys, first, stride, count, 1, found);
        CHECK(found == expected);
        found.clear();
        index.find_run(keys, first, stride, count, 0, found);
        CHECK(found.empty());
    }
}

TEST_CASE("an entry costs little memory") { CHECK(PrefixIndex(100'000).bytes_per_block() <= 72.0); }
