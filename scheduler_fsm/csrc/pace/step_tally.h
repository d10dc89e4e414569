// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "scheduler_fsm/csrc/pace/step_time_model.h"

namespace tokenspeed::scheduler_fsm {

/// What the step-time model said of steps of one shape, and what they took.
struct StepClass {
    std::uint64_t num_steps = 0;
    double predicted_ms = 0;
    double measured_ms = 0;
    double error_ms = 0;  ///< sum of |predicted - measured|
};

/// Steps by shape: rows of decodes and prompt tokens, in a few classes each.
class StepTally {
  public:
    /// A class holds up to so many; the last one everything above.
    static constexpr std::array<double, 4> kMostDecodes = {0, 8, 32, 128};
    static constexpr std::array<double, 3> kMostPromptTokens = {0, 512, 2048};

    void add(const StepWork& work, double predicted_ms, double measured_ms) noexcept {
        if (!std::isfinite(measured_ms) || measured_ms <= 0) return;  // as the model does
        StepClass& entry =
            classes_[class_of(work.decode_tokens, kMostDecodes)][class_of(work.prefill_tokens, kMostPromptTokens)];
        ++entry.num_steps;
        entry.predicted_ms += predicted_ms;
        entry.measured_ms += measured_ms;
        entry.error_ms += std::abs(predicted_ms - measured_ms);
    }

    /// Calls `visit(class of decodes, class of prompt tokens, entry)` for each shape that was seen.
    template <typename Visit>
    void for_each(Visit visit) const {
        for (std::size_t i = 0; i < classes_.size(); ++i) {
            for (std::size_t j = 0; j < classes_[i].size(); ++j) {
                if (classes_[i][j].num_steps > 0) visit(i, j, classes_[i][j]);
            }
        }
    }

  private:
    template <std::size_t N>
    static std::size_t class_of(double count, const std::array<double, N>& most) noexcept {
        std::size_t index = 0;
        while (index < N && count > most[index]) ++index;
        return index;
    }

    std::array<std::array<StepClass, kMostPromptTokens.size() + 1>, kMostDecodes.size() + 1> classes_{};
};

}  // namespace tokenspeed::scheduler_fsm
