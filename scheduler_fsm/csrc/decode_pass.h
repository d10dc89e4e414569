// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "scheduler_fsm/csrc/step_builder.h"

namespace tokenspeed::scheduler_fsm {

/// Gives every decoding request its tokens, in the total order, as long as there is budget.
class DecodePass {
  public:
    explicit DecodePass(StepBuilder& step) noexcept : step_(step) {}

    void run();

  private:
    [[nodiscard]] std::uint32_t wanted_tokens(const Request& request) const noexcept;
    void serve(Request& request, std::uint32_t num_tokens);

    StepBuilder& step_;
};

}  // namespace tokenspeed::scheduler_fsm
