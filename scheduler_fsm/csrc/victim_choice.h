// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "scheduler_fsm/csrc/request.h"

namespace tokenspeed::scheduler_fsm {

struct EngineState;

/// A running request that may be retracted so that another one gets its blocks.
struct VictimCandidate {
    Request* request = nullptr;
    std::uint32_t num_freed_blocks = 0;     ///< that only it owns, counted no further than what is missing
    std::uint32_t num_restored_tokens = 0;  ///< that are computed again in any case when it comes back
};

/// Which one goes? The candidates are those behind the requester in the total order that have no row in this step, the
/// last first, at least one. The answer is an index into them; asked again until enough blocks are free.
using VictimChoice = std::function<std::size_t(std::span<const VictimCandidate>, std::uint32_t num_missing_blocks)>;

/// The request whose retraction helps `request` to `num_blocks` more free blocks at the least cost, or null.
///
/// Looks at the last few requests behind it in the total order that have no row in this step. Of those that give enough
/// alone, the one with the fewest tokens to restore is chosen; where none does, the one that gives most. The later of
/// two equals goes. Blocks that others own, too, are not given. `EngineState::victim_choice` takes the place of this
/// rule, not of the candidates. Throws std::out_of_range for an answer that is none of them.
[[nodiscard]] Request* choose_victim(const EngineState& engine, const Request& request, std::uint32_t num_blocks);

}  // namespace tokenspeed::scheduler_fsm
