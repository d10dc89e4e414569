// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "scheduler_fsm/csrc/engine_state.h"
#include "scheduler_fsm/csrc/execution_plan.h"

namespace tokenspeed::scheduler_fsm {

/// The encoder side of one step. Only requests with encoder inputs may be asked about; the step of any other costs
/// nothing here.
class EncoderPass {
  public:
    /// Drops references to what was computed in earlier plans: whatever this plan evicts, no earlier step still needs.
    EncoderPass(EngineState& engine, ExecutionPlan& plan);

    /// The longest chunk of at most `num_tokens` tokens from `begin` on whose inputs are cached or can be encoded.
    [[nodiscard]] std::uint32_t fitting_tokens(const Request& request, std::uint32_t begin,
                                               std::uint32_t num_tokens) const;

    /// Tokens below which a chunk from `begin` on would be cut to nothing, because an input must not be split.
    [[nodiscard]] std::uint32_t least_tokens(const Request& request, std::uint32_t begin) const noexcept;

    /// Whether the cache, whatever the budget, has no room for what the token at `begin` reads.
    [[nodiscard]] bool lacks_room(const Request& request, std::uint32_t begin) const;

    /// Takes what the next `num_tokens` tokens of `request` read. @pre fitting_tokens(...) == num_tokens
    void commit(Request& request, std::uint32_t num_tokens);

    /// The last request behind `request` in the total order that holds references and got nothing when prompts were
    /// served last.
    [[nodiscard]] Request* stuck_holder_behind(const Request& request) const noexcept;

    /// Tells the workers what goes.
    void close();

  private:
    void note_consumed(Request& request);
    [[nodiscard]] std::uint32_t fit(const Request& request, TokenRange chunk, std::uint32_t budget_embeds) const;

    EngineState& engine_;
    ExecutionPlan& plan_;
    std::uint32_t budget_embeds_;
};

}  // namespace tokenspeed::scheduler_fsm
