// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <limits>
#include <span>

#include "scheduler_fsm/csrc/step_builder.h"

namespace tokenspeed::scheduler_fsm {

/// What rates per user mean for one step. Every call returns at once when nobody has one.
///
/// Users of one step share its time, so the shortest period among them binds; one that is out of reach binds nobody.
class PaceGate {
  public:
    PaceGate(StepBuilder& step, ExecutionPlan& plan) noexcept : step_(step), plan_(plan) {}

    /// Before decodes: when they alone break the target for everybody, one of them waits instead: the last in the total
    /// order that has no rate, or the last.
    void shed();

    /// After decodes: leaves prompts what the slowest user can spare.
    void limit_prefill();

    /// Whether the request may start beside those that run. Once one has to wait, nobody behind it starts.
    [[nodiscard]] bool admits(const Request& request);
    /// Whether a request that may not start ends instead of waiting.
    [[nodiscard]] bool refuses(const Request& request);

    /// After everything: remembers what the step holds.
    void close();

  private:
    static constexpr double kNoPeriod = std::numeric_limits<double>::infinity();

    [[nodiscard]] bool is_on() const noexcept { return step_.engine.pace.is_on(); }
    /// The shortest period of these requests that is within reach, or kNoPeriod. One user's context is
    /// `context_tokens`.
    [[nodiscard]] double binding_period_s(std::span<Request* const> requests, double context_tokens) const noexcept;
    [[nodiscard]] double slowest_user_s(double least_period_s);
    [[nodiscard]] StepWork running_work() const noexcept;
    [[nodiscard]] const Request* next_prompt() const noexcept;
    /// How many of those who wait the rate has room for, if they are like those who run; in log(waiting) steps.
    [[nodiscard]] std::size_t num_startable(double period_s) const noexcept;

    StepBuilder& step_;
    ExecutionPlan& plan_;
    std::size_t num_decode_rows_ = 0;
    StepWork decodes_;
};

}  // namespace tokenspeed::scheduler_fsm
