// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "scheduler_fsm/csrc/engine_state.h"
#include "scheduler_fsm/csrc/execution_plan.h"

namespace tokenspeed::scheduler_fsm {

/// Takes the results of steps in. A batch is checked as a whole before any of it is applied.
class ResultIntake {
  public:
    explicit ResultIntake(EngineState& engine) noexcept : engine_(engine) {}

    /// Applies the results of one step and appends what each live request got to `deliveries`.
    /// An unknown step (late or repeated) is counted and ignored.
    /// @returns what was remembered of the step; no rows of an unknown one
    /// Throws std::invalid_argument naming request, value and what is allowed; nothing is applied then.
    [[nodiscard]] StepRecord apply(const ExecutionEvents& events, std::vector<Delivery>& deliveries);

  private:
    void check(const StepRecord& record, const ExecutionEvents& events) const;
    void apply_row(std::uint64_t step, const StepRecord::Row& row, std::uint32_t row_index,
                   std::span<const TokenId> tokens, std::vector<Delivery>& deliveries);
    void take_back_rejected(Request& request, const StepRecord::Row& row, std::uint32_t num_sampled) const noexcept;
    void append_until_stop(Request& request, std::span<const TokenId> tokens, Delivery& delivery) const;

    EngineState& engine_;
};

}  // namespace tokenspeed::scheduler_fsm
