// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "scheduler_fsm/csrc/request.h"

namespace tokenspeed::scheduler_fsm {

// Requests lie scattered in memory. With a thousand of them a walk finds none in the caches any more, so it has each
// fetched some turns before it arrives there: first the request, then what the request points at.
inline constexpr std::size_t kFetchTurns = 6;

inline void fetch(const void* begin, std::size_t num_bytes) noexcept {
    constexpr std::size_t kLineBytes = 64;
    for (std::size_t offset = 0; offset < num_bytes; offset += kLineBytes) {
        __builtin_prefetch(static_cast<const char*>(begin) + offset);
    }
}

/// To be called on turn `turn` of `num_turns`; `request_at(i)` is the request of turn i, or null.
template <typename RequestAt>
void fetch_ahead(std::size_t turn, std::size_t num_turns, const RequestAt& request_at) noexcept {
    if (turn + 2 * kFetchTurns < num_turns) {
        const Request* far = request_at(turn + 2 * kFetchTurns);
        if (far != nullptr) fetch(far, sizeof(Request));
    }
    if (turn + kFetchTurns < num_turns) {
        const Request* near = request_at(turn + kFetchTurns);
        if (near == nullptr) return;
        if (const kv_flat::KvSequence* sequence = near->kv()) sequence->fetch();
        __builtin_prefetch(near->tokens.data() + near->tokens.size());
    }
}

}  // namespace tokenspeed::scheduler_fsm
