// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/sha256.h"

#include <catch2/catch.hpp>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

using namespace tokenspeed::kv_flat;

namespace {

std::string hex(const Digest& digest) {
    std::string text;
    for (const std::uint8_t byte : digest.bytes) {
        char pair[3];
        std::snprintf(pair, sizeof pair, "%02x", byte);
        text += pair;
    }
    return text;
}

std::string hash(const std::string& message) {
    Sha256 state;
    state.update({reinterpret_cast<const std::uint8_t*>(message.data()), message.size()});
    return hex(state.finish());
}

}  // namespace

TEST_CASE("SHA-256 gives the digests of FIPS 180-4") {
    CHECK(hash("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(hash("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK(hash("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK(hash(std::string(1'000'000, 'a')) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_CASE("the processor's instructions and the portable code agree on every block") {
    std::mt19937_64 random(7);
    for (int round = 0; round < 200; ++round) {
        std::vector<std::uint8_t> blocks(Sha256::kBlockBytes * (1 + random() % 4));
        for (auto& byte : blocks) byte = static_cast<std::uint8_t>(random());
        std::array<std::uint32_t, 8> expected{};
        for (auto& word : expected) word = static_cast<std::uint32_t>(random());
        auto actual = expected;
        sha256_detail::compress_portable(expected, blocks.data(), blocks.size() / Sha256::kBlockBytes);
        sha256_detail::fastest_compress()(actual, blocks.data(), blocks.size() / Sha256::kBlockBytes);
        REQUIRE(actual == expected);
    }
}

TEST_CASE("how a message is cut into updates does not matter") {
    std::mt19937_64 random(8);
    for (std::size_t length = 0; length < 300; length += 7) {
        std::vector<std::uint8_t> message(length);
        for (auto& byte : message) byte = static_cast<std::uint8_t>(random());
        Sha256 whole;
        whole.update(message);
        Sha256 pieces;
        std::span<const std::uint8_t> rest = message;
        while (!rest.empty()) {
            const std::size_t size = 1 + random() % rest.size();
            pieces.update(rest.first(size));
            rest = rest.subspan(size);
        }
        REQUIRE(hex(pieces.finish()) == hex(whole.finish()));
    }
}
