// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tokenspeed::kv_flat {

/// A SHA-256 value. Two digests are the same block content only if all 32 bytes agree.
struct Digest {
    std::array<std::uint8_t, 32> bytes{};

    /// Eight bytes at a time: the comparison of arrays is a call.
    friend bool operator==(const Digest& a, const Digest& b) noexcept {
        std::array<std::uint64_t, 4> x;
        std::array<std::uint64_t, 4> y;
        std::memcpy(x.data(), a.bytes.data(), sizeof x);
        std::memcpy(y.data(), b.bytes.data(), sizeof y);
        return ((x[0] ^ y[0]) | (x[1] ^ y[1]) | (x[2] ^ y[2]) | (x[3] ^ y[3])) == 0;
    }

    /// The first eight bytes, already uniform: the hash of a hash table needs no further mixing.
    [[nodiscard]] std::uint64_t leading_bits() const noexcept {
        std::uint64_t value = 0;
        std::memcpy(&value, bytes.data(), sizeof value);
        return value;
    }
};

}  // namespace tokenspeed::kv_flat
