// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace tokenspeed::kv_flat {

/// Tokens behind a match that had been computed before, by why they are computed again.
struct LostTokens {
    std::uint32_t num_evicted = 0;        ///< their block was given up, or one in front of it was
    std::uint32_t num_granularity = 0;    ///< cached, but the match had to end at a coarser boundary
    std::uint32_t num_missing_state = 0;  ///< full attention has them, a group that keeps less does not
};

}  // namespace tokenspeed::kv_flat
