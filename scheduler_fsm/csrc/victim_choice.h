// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "scheduler_fsm/csrc/engine_state.h"

namespace tokenspeed::scheduler_fsm {

/// The request whose retraction helps `request` to `num_blocks` more free blocks at the least cost, or null.
///
/// Looks at the last few requests behind it in the total order that have no row in this step. Of those that give enough
/// alone, the one with the fewest tokens to restore is chosen; where none does, the one that gives most. The later of
/// two equals goes. Blocks that others own, too, are not given.
[[nodiscard]] Request* choose_victim(const EngineState& engine, const Request& request, std::uint32_t num_blocks);

}  // namespace tokenspeed::scheduler_fsm
