// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <functional>

#include "scheduler_fsm/csrc/pace/step_tally.h"
#include "scheduler_fsm/csrc/pace/step_time_model.h"

namespace tokenspeed::scheduler_fsm {

/// What becomes of a request that the rate per user has no room for.
enum class Overload : std::uint8_t {
    kQueue,    ///< waits, in the total order
    kRefuse,   ///< ends at once with an error, unless it ran before
    kDegrade,  ///< runs: the rate falls for all alike
};

/// What is asked when a step's decodes are settled: how many prompt tokens may share the step?
struct ChunkQuestion {
    StepWork decodes;               ///< of this step
    double begin_tokens = 0;        ///< of the prompt that is served next, computed already
    std::uint32_t most_tokens = 0;  ///< what the step's token budget leaves
    double period_ms = 0;           ///< time per token of the target, the shortest among those who decode
    double slowest_user_ms = 0;     ///< until the next token of the slowest user is due
    double since_prompts_ms = 0;    ///< from the end of the last step with prompts to the begin of this one
    double started_tokens = 0;      ///< that prompts which are computed in part still lack
    double waiting_tokens = 0;      ///< that those which have not begun lack, going by the last ones that did
    double newcomers = 0;           ///< prompts that have begun, or wait and may begin
    double held_requests = 0;       ///< that wait because neither rate nor slots have room for them
};

/// Answers it. The scheduler never gives more than `most_tokens`, and keeps prompts from starving by itself.
using ChunkBudget = std::function<std::uint32_t(const ChunkQuestion&, const StepTimeModel&)>;

/// The largest chunk whose step ends before the slowest user's token is due. A user that is behind does not stop
/// prompts altogether, and one that is ahead does not allow a step that everybody feels.
///
/// Where prompts cost a step more than their tokens do, they are gathered: newcomers wait until the last prompts are up
/// to a period ago, unless they fill a step; and a step grows past the largest CUDA graph only when that saves steps.
/// While others wait whom the rate has no room for, they are gathered until they fill a graph and run at once.
[[nodiscard]] std::uint32_t chunk_within_target(const ChunkQuestion& question, const StepTimeModel& model);

/// Keeps a rate of output tokens per user: measures steps, and says what a step may hold.
///
/// Off without a target until the first request that brings one of its own; then nothing is measured and nobody asks.
/// Where a period is asked for it is seconds per token that are aimed at, a little less than the target's.
class PaceControl {
  public:
    explicit PaceControl(double target_tps, Overload overload = Overload::kQueue, GraphSizes graphs = GraphSizes());

    [[nodiscard]] bool is_on() const noexcept { return is_on_; }
    [[nodiscard]] Overload overload() const noexcept { return overload_; }
    /// Of users who say nothing; 0 without a target.
    [[nodiscard]] double period_s() const noexcept { return period_s_; }
    /// Of a request that asks for `target_tps`, 0 being no rate at all and less the same as everybody. A rate of its
    /// own switches the control on.
    [[nodiscard]] double period_for(double target_tps) noexcept;
    [[nodiscard]] const StepTimeModel& model() const noexcept { return model_; }
    /// False while so few steps were measured that nobody is retracted or refused by the model.
    [[nodiscard]] bool has_seen_steps() const noexcept { return model_.num_steps() >= kFewSteps; }
    /// Begins with what another run learnt; nobody is retracted or refused by it before steps were seen.
    void start_from(const StepTimeProfile& profile) noexcept { model_.start_from(profile); }
    void set_chunk_budget(ChunkBudget budget) { chunk_budget_ = std::move(budget); }

    /// @param num_prompt_rows of them, prompts that begin or go on.
    void note_planned(std::uint64_t step, double now_s, const StepWork& work, std::size_t num_prompt_rows = 0);
    /// Takes the time of a step in. `has_more`: requests run or wait, so the next step follows at once.
    void note_completed(std::uint64_t step, double now_s, bool has_more);

    /// When a step that is planned now will begin: after those in flight.
    [[nodiscard]] double begin_s(double now_s) const noexcept;

    /// Periods below this are out of reach, even for one user of this context alone; no limit helps to keep them.
    [[nodiscard]] double least_period_s(double context_tokens) const noexcept;
    /// Whether decodes of this work, all in one step, leave room for prompts within the period: less where prompts are
    /// gathered.
    /// Nor may they come so near to the largest CUDA graph that every step with prompts is too large for it, where that
    /// costs much.
    [[nodiscard]] bool admits(const StepWork& decodes, double period_s) const noexcept;
    /// True once decodes alone have broken the period for several plans on end; an infinite one is never broken.
    [[nodiscard]] bool must_shed(const StepWork& decodes, double period_s) noexcept;
    /// Prompt tokens that may share a step. `prompts_want`: somebody has tokens to compute.
    [[nodiscard]] std::uint32_t prefill_tokens(const ChunkQuestion& question, bool prompts_want);
    /// Milliseconds from the end of the last step with prompts to `begin_s`.
    [[nodiscard]] double since_prompts_ms(double begin_s) const noexcept { return (begin_s - prompts_end_s_) * 1e3; }
    /// Tokens that a prompt which has not begun lacks, going by the last ones.
    [[nodiscard]] double tokens_per_prompt() const noexcept { return tokens_per_prompt_row_; }

    struct Report {
        double predicted_ms = 0;  ///< of the last step
        double measured_ms = 0;
        std::uint32_t chunk_tokens = 0;  ///< the last limit that was set
        std::uint64_t num_limited_steps = 0;
        std::uint64_t num_held_admissions = 0;
        std::uint64_t num_shed_requests = 0;
        std::uint64_t num_refused_requests = 0;
        std::uint64_t num_degraded_admissions = 0;
    };
    Report report;
    StepTally tally;

  private:
    static constexpr std::uint64_t kFewSteps = 16;

    struct InFlight {
        std::uint64_t step;
        double planned_s;
        double begin_s;
        double predicted_ms;
        StepWork work;
    };

    double period_s_;
    bool is_on_;
    Overload overload_;
    StepTimeModel model_;
    ChunkBudget chunk_budget_ = chunk_within_target;
    std::deque<InFlight> in_flight_;
    double last_completed_s_ = 0;
    bool was_idle_ = true;
    double least_ms_ = 1e9;  // of the steps of late
    std::uint32_t num_overloaded_plans_ = 0;
    std::uint32_t num_hungry_plans_ = 0;
    double prompts_end_s_ = 0;          // of the last step that holds some, as far as is known
    double tokens_per_prompt_row_ = 0;  // of the last ones
};

}  // namespace tokenspeed::scheduler_fsm
