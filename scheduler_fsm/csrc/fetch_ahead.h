// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "scheduler_fsm/csrc/request.h"

namespace tokenspeed::scheduler_fsm {

// With a thousand requests a walk finds none in the caches any more, so it has each fetched some turns before it
// arrives there: first the request, then what the request points at.
inline constexpr std::size_t kFetchTurns = 6;

inline void fetch(const void* begin, std::size_t num_bytes) noexcept {
    for (std::size_t offset = 0; offset < num_bytes; offset += kCacheLineBytes) {
        __builtin_prefetch(static_cast<const char*>(begin) + offset);
    }
}

/// To be called on turn `turn` of `num_turns`, for a walk that reads what steps need of requests.
/// @param request_at the request of a turn, or null
template <typename RequestAt>
void fetch_ahead(std::size_t turn, std::size_t num_turns, const RequestAt& request_at) noexcept {
    if (turn + 2 * kFetchTurns >= num_turns) return;
    const Request* far = request_at(turn + 2 * kFetchTurns);
    if (far != nullptr) fetch(far, Request::kHotBytes);
}

/// The same for what requests point at; they have been fetched themselves.
/// @param fetch_parts called with the request
template <typename RequestAt, typename FetchParts>
void fetch_parts_ahead(std::size_t turn, std::size_t num_turns, const RequestAt& request_at,
                       const FetchParts& fetch_parts) noexcept {
    if (turn + kFetchTurns >= num_turns) return;
    const Request* near = request_at(turn + kFetchTurns);
    if (near != nullptr) fetch_parts(*near);
}

}  // namespace tokenspeed::scheduler_fsm
