// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "scheduler_fsm/csrc/pace/graph_sizes.h"
#include "scheduler_fsm/csrc/pace/least_squares.h"

namespace tokenspeed::scheduler_fsm {

/// What a step computes, as far as its time depends on it.
struct StepWork {
    double decode_tokens = 0;   ///< rows of decodes, drafts counted
    double context_tokens = 0;  ///< KV tokens that they read
    double prefill_tokens = 0;
    double prefill_pairs = 0;  ///< (prompt token, token it attends to)
    /// Tokens of another step with prompts that the host launched while this one ran; 0: it launched none. With
    /// asynchronous scheduling that is the step behind this one, and what launching takes is felt here. Of a step that
    /// is planned: its own, since its own users will feel it.
    double launched_tokens = 0;

    [[nodiscard]] bool has_prompts() const noexcept { return prefill_tokens > 0 || launched_tokens > 0; }
    /// With `num_tokens` more tokens of a prompt of which `begin` are computed.
    [[nodiscard]] StepWork with_prefill(double begin, double num_tokens) const noexcept {
        StepWork more = *this;
        more.prefill_tokens += num_tokens;
        more.prefill_pairs += num_tokens * (begin + num_tokens / 2);
        more.launched_tokens = more.prefill_tokens > 0 ? more.decode_tokens + more.prefill_tokens : 0;
        return more;
    }
};

/// A model in plain figures, as a file keeps it from one start to the next.
struct StepTimeProfile {
    double fixed_ms = 0;
    double row_us = 0;          ///< per decode row
    double context_us = 0;      ///< per KV token that decodes read
    double prefill_us = 0;      ///< per prompt token
    double pair_us = 0;         ///< per (prompt token, token it attends to)
    double mixed_ms = 0;        ///< more when a step that fits a CUDA graph holds prompts
    double large_mixed_ms = 0;  ///< more when one that fits none does
    double large_ms = 0;        ///< more when decodes alone fit none
};

/// The last few steps: the median over them is not moved by one outlier, but within four steps by a lasting change.
class RecentSteps {
  public:
    void add(const StepWork& work, double measured_ms) noexcept;
    /// Median of measured over what `fitted_ms` says of each; `otherwise` until there is a step.
    template <typename Fitted>
    [[nodiscard]] double median_ratio(Fitted fitted_ms, double otherwise) const noexcept {
        const std::size_t size = std::min(num_seen_, kSize);
        if (size == 0) return otherwise;
        std::array<double, kSize> ratios{};
        for (std::size_t i = 0; i < size; ++i) ratios[i] = steps_[i].measured_ms / fitted_ms(steps_[i].work);
        const auto middle = ratios.begin() + static_cast<std::ptrdiff_t>(size / 2);
        std::nth_element(ratios.begin(), middle, ratios.begin() + static_cast<std::ptrdiff_t>(size));
        return *middle;
    }

  private:
    static constexpr std::size_t kSize = 7;
    struct Step {
        StepWork work;
        double measured_ms = 0;
    };
    std::array<Step, kSize> steps_{};
    std::size_t num_seen_ = 0;
};

/// Milliseconds that something costs in any case: a mean that forgets.
class FixedCost {
  public:
    void start_from(double known_ms) noexcept;
    /// A sample moves it by at most `most_ms` times what a mean gives it.
    void add(double sample_ms, double most_ms) noexcept;
    [[nodiscard]] double ms() const noexcept { return ms_; }

  private:
    static constexpr double kFirstWeight = 0.25;
    static constexpr double kLeastWeight = 1.0 / 16;
    double ms_ = 0;
    double weight_ = kFirstWeight;
};

/// Milliseconds of a step, learnt from the steps that were.
///
/// Two fits: what decodes take (a fixed cost, graph-padded rows, context), from steps without prompts; and what prompts
/// add (tokens, pairs), from steps with them. Apart, because a step that is filled up to a target takes the same time
/// whatever is in it, and one fit over everything would end up calling all of it fixed cost. The median of the last
/// ratios of measured to fitted, of either kind of step, makes up for fits that are wrong as a whole.
class StepTimeModel {
  public:
    explicit StepTimeModel(GraphSizes graphs = GraphSizes());

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

    /// Milliseconds that prompts add to `decodes`, however few tokens they have.
    [[nodiscard]] double least_prompt_ms(const StepWork& decodes) const noexcept;
    /// Milliseconds that prompts add on top of that when the step becomes too large for a CUDA graph; 0 until one was.
    [[nodiscard]] double large_step_ms() const noexcept;
    /// Prompt tokens beside `decodes` with which the step still fits a CUDA graph; without graphs it always does.
    [[nodiscard]] std::uint32_t captured_prefill(const StepWork& decodes) const noexcept;

    /// Mean of |predicted - measured| / measured over about the last 64 steps.
    [[nodiscard]] double relative_error() const noexcept { return relative_error_; }
    [[nodiscard]] std::uint64_t num_steps() const noexcept { return num_steps_; }

  private:
    [[nodiscard]] double fitted_ms(const StepWork& work) const noexcept;
    [[nodiscard]] double correction(std::size_t kind) const noexcept { return corrections_[kind]; }
    void correct() noexcept;
    /// What prompts add to `work` whatever their tokens are, before corrections.
    [[nodiscard]] double prompt_fixed_ms(const StepWork& work) const noexcept;
    void learn_prompts(const StepWork& work, double added_ms, double scale_ms) noexcept;
    /// On device and host together.
    [[nodiscard]] double mixed_ms(bool is_large) const noexcept {
        return mixed_[is_large].ms() + launched_[is_large].ms();
    }
    [[nodiscard]] std::array<double, 4> decode_features(const StepWork& work) const noexcept;
    [[nodiscard]] std::array<double, 2> prompt_features(const StepWork& work) const noexcept;

    GraphSizes graphs_;
    LeastSquares<4> decodes_;
    LeastSquares<2> prompts_;
    std::array<FixedCost, 2> mixed_;     // of a step with prompts that fits a graph, and of one that fits none
    std::array<FixedCost, 2> launched_;  // felt while the host launches such a step
    std::array<RecentSteps, 2> recent_;  // without and with prompts
    std::array<double, 2> corrections_ = {1.0, 1.0};
    double relative_error_ = 0;
    std::uint64_t num_steps_ = 0;
    bool has_seen_large_ = false;  // a step with prompts that was too large for every graph
};

}  // namespace tokenspeed::scheduler_fsm
