// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "scheduler_fsm/csrc/pace/least_squares.h"

namespace tokenspeed::scheduler_fsm {

/// What a step computes, as far as its time depends on it.
struct StepWork {
    double decode_tokens = 0;   ///< rows of decodes, drafts counted
    double context_tokens = 0;  ///< KV tokens that they read
    double prefill_tokens = 0;
    double prefill_pairs = 0;  ///< (prompt token, token it attends to)

    /// With `num_tokens` more tokens of a prompt of which `begin` are computed.
    [[nodiscard]] StepWork with_prefill(double begin, double num_tokens) const noexcept {
        StepWork more = *this;
        more.prefill_tokens += num_tokens;
        more.prefill_pairs += num_tokens * (begin + num_tokens / 2);
        return more;
    }
};

/// A model in plain figures, as a file keeps it from one start to the next.
struct StepTimeProfile {
    double fixed_ms = 0;
    double row_us = 0;      ///< per decode row
    double context_us = 0;  ///< per KV token that decodes read
    double prefill_us = 0;  ///< per prompt token
    double pair_us = 0;     ///< per (prompt token, token it attends to)
};

/// The median of the last few values: one outlier does not move it, a lasting change does within four.
class RecentMedian {
  public:
    void add(double value) noexcept;
    /// `otherwise` until there is a value.
    [[nodiscard]] double value(double otherwise) const noexcept;

  private:
    static constexpr std::size_t kSize = 7;
    std::array<double, kSize> values_{};
    std::size_t num_seen_ = 0;
};

/// Milliseconds of a step, learnt from the steps that were.
///
/// Two fits: what decodes take (a fixed cost, graph-padded rows, context), from steps without prompts; and what prompts
/// add (tokens, pairs), from steps with them. Apart, because a step that is filled up to a target takes the same time
/// whatever is in it, and one fit over everything would end up calling all of it fixed cost. The median of the last
/// ratios of measured to fitted, of either kind of step, makes up for fits that are wrong as a whole.
class StepTimeModel {
  public:
    StepTimeModel() noexcept;

    /// Begins with what another run learnt, in place of a guess.
    void start_from(const StepTimeProfile& profile) noexcept;
    /// What is known now, corrections of the whole included.
    [[nodiscard]] StepTimeProfile profile() const noexcept;

    [[nodiscard]] double predict_ms(const StepWork& work) const noexcept;

    /// Takes a measured step in. Times that cannot be (zero, negative, not finite) are ignored.
    void learn(const StepWork& work, double measured_ms) noexcept;

    /// Prompt tokens that fit into `budget_ms` behind `work`, at most `most`; the prompt has `begin` tokens already.
    [[nodiscard]] std::uint32_t fitting_prefill(const StepWork& work, double begin, double budget_ms,
                                                std::uint32_t most) const noexcept;

    /// Mean of |predicted - measured| / measured over about the last 64 steps.
    [[nodiscard]] double relative_error() const noexcept { return relative_error_; }
    [[nodiscard]] std::uint64_t num_steps() const noexcept { return num_steps_; }

  private:
    [[nodiscard]] double fitted_ms(const StepWork& work) const noexcept;
    [[nodiscard]] double correction(std::size_t kind) const noexcept;

    LeastSquares<3> decodes_;
    LeastSquares<2> prompts_;
    std::array<RecentMedian, 2> ratios_;  // of steps without and with prompts
    double relative_error_ = 0;
    std::uint64_t num_steps_ = 0;
};

}  // namespace tokenspeed::scheduler_fsm
