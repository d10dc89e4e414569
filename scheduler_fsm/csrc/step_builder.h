// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "scheduler_fsm/csrc/encoder_pass.h"
#include "scheduler_fsm/csrc/engine_state.h"
#include "scheduler_fsm/csrc/execution_plan.h"

namespace tokenspeed::scheduler_fsm {

enum class PauseLevel : std::uint8_t {
    kNone,
    kNew,  ///< running requests go on, nothing is admitted
    kAll,  ///< empty steps
};

/// Outside wishes for one step.
struct StepOptions {
    PauseLevel pause = PauseLevel::kNone;
    bool throttle_prefills = false;  ///< data-parallel ranks keep their prefills in the same steps
    double now_s = 0;                ///< read only with a rate per user
};

/// Blocks that running prefills were promised at admission and have not taken yet.
class Reservations {
  public:
    void set(const Request& request, std::uint32_t num_blocks) {
        for (Entry& entry : entries_) {
            if (entry.request == &request) {
                entry.num_blocks = num_blocks;
                return;
            }
        }
        if (num_blocks > 0) entries_.push_back({&request, num_blocks});
    }
    /// Promised to requests that go before `request`: it must leave these alone.
    [[nodiscard]] std::uint32_t before(const Request& request) const noexcept {
        std::uint32_t sum = 0;
        for (const Entry& entry : entries_) sum += entry.request->order < request.order ? entry.num_blocks : 0;
        return sum;
    }
    [[nodiscard]] std::uint32_t total() const noexcept {
        std::uint32_t sum = 0;
        for (const Entry& entry : entries_) sum += entry.num_blocks;
        return sum;
    }

  private:
    struct Entry {
        const Request* request;
        std::uint32_t num_blocks;
    };
    std::vector<Entry> entries_;
};

/// One step under construction: its rows, its budget and the moves that both passes share.
class StepBuilder {
  public:
    StepBuilder(EngineState& engine, ExecutionPlan& plan, const StepOptions& options);

    EngineState& engine;
    const StepOptions options;
    Reservations reservations;
    EncoderPass encoders;
    std::uint32_t token_budget;
    std::uint32_t lacking_tokens = 1;  ///< the most that a prefill needs at once and did not get

    /// Tokens that one more request may get: a drafter adds input rows of its own per request.
    [[nodiscard]] std::uint32_t room_for_one() const noexcept;

    /// Requests that fit with one token each.
    [[nodiscard]] std::uint32_t row_capacity() const noexcept {
        return std::min(token_budget, input_rows_ / (1 + engine.config.drafter_slots));
    }

    /// Tokens of `request` that a step could compute: all that are pending, up to the model's context.
    [[nodiscard]] std::uint32_t computable_tokens(const Request& request) const noexcept;

    [[nodiscard]] bool is_planned(const Request& request) const noexcept {
        return request.last_planned_step == engine.step;
    }

    /// Free blocks that `request` may take.
    [[nodiscard]] std::uint32_t free_blocks_for(const Request& request) const noexcept;

    /// Blocks that `request` lacks for `num_tokens` more tokens (and what a drafter writes behind them).
    [[nodiscard]] std::uint32_t missing_blocks(const Request& request, std::uint32_t num_tokens) const noexcept;

    /// The most of `num_tokens` that fits into the blocks `request` may take.
    [[nodiscard]] std::uint32_t fitting_tokens(const Request& request, std::uint32_t num_tokens) const noexcept;

    /// Retracts idle sessions, then requests behind `request` in the total order, cheapest first, until it may take
    /// `num_blocks`.
    /// Requests that already have a row in this step are left alone. False when that is not enough.
    [[nodiscard]] bool make_room(const Request& request, std::uint32_t num_blocks);

    /// How much of a prompt's next `num_tokens` tokens one step should compute, so that states are left behind where
    /// other prompts can start from them. Any end is right; without such groups nothing is cut.
    [[nodiscard]] std::uint32_t chunk_tokens(const Request& request, std::uint32_t num_tokens) const noexcept;

    void retract(Request& request);

    /// Ends a request that fills the pool alone and can get no further. Does nothing while others hold blocks.
    void end_if_pool_is_its_own(Request& request);

    /// Commits `num_tokens` tokens of `request` to the step. @pre missing_blocks(...) <= free_blocks_for(...)
    void add_row(Request& request, std::uint32_t num_tokens);

    /// Remembers the step, so that its results can be checked when they come.
    void close();

  private:
    [[nodiscard]] std::uint32_t end_tokens(const Request& request, std::uint32_t num_tokens) const noexcept;
    [[nodiscard]] PlanRow make_row(Request& request, std::uint32_t num_tokens) const noexcept;
    /// Notes where the new blocks of each group begin; true when there are any.
    [[nodiscard]] bool append_news(Request& request);
    void keep_states(Request& request, std::uint32_t num_tokens);
    [[nodiscard]] std::uint32_t last_checkpoint(const Request& request) const noexcept;
    [[nodiscard]] bool can_use_drafts(const PlanRow& row) const noexcept;
    void plan_drafts();

    ExecutionPlan& plan_;
    StepRecord record_;
    std::uint32_t input_rows_;
};

}  // namespace tokenspeed::scheduler_fsm
