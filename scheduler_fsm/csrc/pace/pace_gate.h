// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "scheduler_fsm/csrc/step_builder.h"

namespace tokenspeed::scheduler_fsm {

/// What the rate per user means for one step. Every call returns at once when there is no target.
class PaceGate {
  public:
    PaceGate(StepBuilder& step, ExecutionPlan& plan) noexcept : step_(step), plan_(plan) {}

    /// Before decodes: when they alone break the target for everybody, the last one in the total order waits instead.
    void shed();

    /// After decodes: leaves prompts what the slowest user can spare.
    void limit_prefill();

    /// Whether the request may start beside those that run. Once one may not, nobody behind it may.
    [[nodiscard]] bool admits(const Request& request);

    /// After everything: remembers what the step holds.
    void close();

  private:
    [[nodiscard]] bool is_on() const noexcept { return step_.engine.pace.is_on(); }
    [[nodiscard]] double slowest_user_s();
    [[nodiscard]] StepWork running_work() const noexcept;
    [[nodiscard]] const Request* next_prompt() const noexcept;

    StepBuilder& step_;
    ExecutionPlan& plan_;
    std::size_t num_decode_rows_ = 0;
    StepWork decodes_;
};

}  // namespace tokenspeed::scheduler_fsm
