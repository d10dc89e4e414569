// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

namespace tokenspeed::kv_flat {

[[nodiscard]] constexpr std::uint32_t ceil_div(std::uint32_t value, std::uint32_t unit) noexcept {
    return value / unit + (value % unit != 0);
}

/// How much of a sequence's past a group keeps.
enum class Retention : std::uint8_t {
    kFull,           ///< every token
    kSlidingWindow,  ///< the last `window_tokens` tokens before the one being computed, itself included
    kChunk,          ///< the tokens since the last multiple of `window_tokens` (chunked local attention)
    kState,          ///< one state, that behind the last token; workers keep it in the column of that token
};

/// One of vLLM's KV cache groups, as far as block bookkeeping is concerned.
struct GroupSpec {
    std::string name;
    std::uint32_t block_tokens = 0;
    Retention retention = Retention::kFull;
    std::uint32_t window_tokens = 0;  ///< kSlidingWindow: its length; kChunk: that of a chunk

    /// Leading blocks that no token at or after position `num_computed_tokens` reads.
    [[nodiscard]] std::uint32_t num_dead_blocks(std::uint32_t num_computed_tokens) const noexcept {
        if (retention == Retention::kState) return std::max(ceil_div(num_computed_tokens, block_tokens), 1U) - 1;
        if (retention == Retention::kChunk) return num_computed_tokens / window_tokens * window_tokens / block_tokens;
        if (retention == Retention::kFull || num_computed_tokens + 1 <= window_tokens) return 0;
        return (num_computed_tokens + 1 - window_tokens) / block_tokens;
    }

    /// Most blocks that a sequence of `num_tokens` ever holds at once, with at most `in_flight_tokens` being computed.
    [[nodiscard]] std::uint32_t max_held_blocks(std::uint32_t num_tokens,
                                                std::uint32_t in_flight_tokens) const noexcept {
        const std::uint32_t all = ceil_div(num_tokens, block_tokens);
        if (retention == Retention::kFull) return all;
        // The state that a step starts from, and the one that it leaves behind.
        if (retention == Retention::kState) return std::min(all, 2U);
        // The window may start and end inside a block: one more than its length needs.
        return std::min(all, ceil_div(window_tokens - 1 + in_flight_tokens, block_tokens) + 1);
    }
};

}  // namespace tokenspeed::kv_flat
