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

    friend bool operator==(const Digest&, const Digest&) = default;

    /// The first eight bytes, already uniform: the hash of a hash table needs no further mixing.
    [[nodiscard]] std::uint64_t leading_bits() const noexcept {
        std::uint64_t value = 0;
        std::memcpy(&value, bytes.data(), sizeof value);
        return value;
    }
};

}  // namespace tokenspeed::kv_flat
