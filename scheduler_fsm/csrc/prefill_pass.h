// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "scheduler_fsm/csrc/admission.h"
#include "scheduler_fsm/csrc/step_builder.h"

namespace tokenspeed::scheduler_fsm {

/// Shares what decodes left among prompts.
///
/// In the total order, every prompt that can be finished is. The first that cannot gets half of what is left and the
/// other half is the short lane: prompts by virtual deadline (arrival plus length, on a clock of prefilled tokens). So
/// the oldest moves at half speed at least, a short prompt behind a 200K one waits for a bounded number of steps, and
/// no stream of short ones starves a long one.
class PrefillPass {
  public:
    PrefillPass(StepBuilder& step, Admission& admission) noexcept : step_(step), admission_(admission) {}

    /// Whether this step is for decodes alone.
    [[nodiscard]] bool is_throttled() const;

    void run();

  private:
    /// What the short lane may take of a step, and what of the room of one row it leaves for the prompt that is cut.
    struct LaneShare {
        std::uint32_t num_tokens = 0;
        std::uint32_t kept_tokens = 0;
    };

    void serve_in_order();
    void serve_short_lane(LaneShare share);
    [[nodiscard]] bool start(Request& request);
    [[nodiscard]] std::uint32_t chunk_limit() const noexcept;
    [[nodiscard]] std::uint32_t least_tokens(const Request& request) const noexcept;
    [[nodiscard]] std::uint32_t wanted_tokens(const Request& request);
    [[nodiscard]] LaneShare lane_share() const noexcept;
    void note_lack(const Request& request) noexcept;
    [[nodiscard]] bool others_want(const Request& request) const;
    [[nodiscard]] std::uint32_t serve(Request& request, std::uint32_t num_tokens);

    StepBuilder& step_;
    Admission& admission_;
    Request* cut_ = nullptr;       // the prompt that takes half; it gets its row last, with what the lane left over
    std::uint32_t lane_lack_ = 0;  // the most that a request of the lane needed at once and did not get
};

}  // namespace tokenspeed::scheduler_fsm
