// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace tokenspeed::fuzz {

/// Throws of the dice: a setting, then events.
using Input = std::vector<std::uint8_t>;

inline constexpr std::size_t kMaxInputBytes = 1024;

}  // namespace tokenspeed::fuzz
