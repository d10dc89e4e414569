// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "scheduler_fsm/csrc/engine_state.h"

namespace tokenspeed::scheduler_fsm {

/// Prompts that come together and share a prefix, such as those of sub-agents: the oldest computes it, the others wait
/// for it and share the blocks. Starting them beside it would compute the prefix once for each.
///
/// Nobody waits for a request behind it in the total order, and for no more than the shared part.
class PrefixLeaders {
  public:
    explicit PrefixLeaders(EngineState& engine) noexcept : engine_(engine) {}

    /// Whether the leader that `follow` has noted is still on its way to the end of the shared prefix.
    [[nodiscard]] bool is_awaited(const Request& request) const;

    /// Notes who is about to compute the block behind the cached prefix of `request`; false when nobody is.
    [[nodiscard]] bool follow(Request& request, std::uint32_t num_cached_tokens);

  private:
    [[nodiscard]] bool can_share(const Request& request) const;

    EngineState& engine_;
};

}  // namespace tokenspeed::scheduler_fsm
