// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "scheduler_fsm/csrc/step_builder.h"

namespace tokenspeed::scheduler_fsm {

/// What idle sessions hold, for requests that need it now. They give it up the longest idle first, and only when that
/// can help.
class IdleSessions {
  public:
    explicit IdleSessions(StepBuilder& step) noexcept : step_(step) {}

    /// Blocks that retracting all of them may set free, at most.
    [[nodiscard]] std::uint32_t num_blocks() const noexcept;

    /// Takes KV and slot of the one that is idle the longest. False when there is none.
    bool retract_one();

    /// Takes slots until one is free.
    void free_slot();

    /// Whether a request with this adapter may join the batch, after taking adapters that only idle sessions use.
    [[nodiscard]] bool free_adapter(std::int32_t adapter);

  private:
    StepBuilder& step_;
};

}  // namespace tokenspeed::scheduler_fsm
