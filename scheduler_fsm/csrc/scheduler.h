// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "scheduler_fsm/csrc/engine_state.h"
#include "scheduler_fsm/csrc/execution_plan.h"
#include "scheduler_fsm/csrc/step_builder.h"

namespace tokenspeed::scheduler_fsm {

/// Why a request can never run. Said once, on arrival.
struct Refusal {
    std::string message;
};

/// The control plane: requests in, one plan per step out, results back in. It only decides; workers execute.
///
/// Not thread-safe. Handles stay valid until `release`; plans and deliveries until the next call.
class Scheduler {
  public:
    /// Throws std::invalid_argument naming the field, its value and what is allowed.
    explicit Scheduler(SchedulerConfig config);

    /// Takes a request in, or says why it can never run. Throws std::invalid_argument for an empty prompt.
    [[nodiscard]] std::variant<RequestHandle, Refusal> submit(RequestSpec spec);

    /// What submit() waited for (a grammar) is there.
    void open_gate(RequestHandle handle);

    /// Gives a session whose turn is over its next input, or says why that can never run.
    /// Throws std::invalid_argument for an empty input and for a request that does not wait for any.
    [[nodiscard]] std::optional<Refusal> feed(RequestHandle handle, TurnInput input);

    /// Plans the next step.
    [[nodiscard]] const ExecutionPlan& plan(const StepOptions& options = {});

    /// Takes in the results of a planned step. Throws std::invalid_argument, with no change, when they cannot be true.
    [[nodiscard]] std::span<const Delivery> advance(const ExecutionEvents& events);

    /// The step whose results came last: the rows that deliveries name.
    [[nodiscard]] const StepRecord& last_record() const noexcept { return last_record_; }

    /// Sets what the request's next step verifies. Ignored for a request that does not decode.
    void set_drafts(RequestHandle handle, std::span<const TokenId> drafts);

    /// Ends a request in whatever state it is. False when the handle is stale or the request has ended.
    bool finish(RequestHandle handle, FinishReason why);

    /// Forgets a finished request.
    void release(RequestHandle handle);

    /// Takes the KV of every running request away; they wait to be admitted again.
    void retract_all();

    /// KV may also come from `store`, which outlives the scheduler. Ended requests are then kept until `let_go`.
    /// @param needs_delivery it hands the KV of ended requests on, so that one may not end without it
    void attach(ExternalKv& store, bool needs_delivery) noexcept {
        engine_.transfers.store = &store;
        engine_.transfers.needs_delivery = needs_delivery;
    }

    /// Forgets an ended request as soon as nobody uses its blocks. In place of `release` with an external store.
    /// @param awaits_send the store still reads its blocks, and reports with `send_done`
    void let_go(RequestHandle handle, bool awaits_send);

    /// The store reports. False, and counted, when nobody waits for that.
    bool load_done(RequestHandle handle);
    bool send_done(RequestHandle handle);
    /// Nothing of a load in flight will be valid; its end is still to be reported.
    void fail_load(RequestHandle handle);

    /// Blocks whose load failed. What loads in flight brought behind them is not used.
    /// @returns running requests that read one of them in a step in flight; their results of these steps are dropped
    [[nodiscard]] std::vector<Request*> invalidate(std::span<const kv_flat::BlockId> blocks);

    /// Takes the KV of a request away that `invalidate` named.
    void recompute(RequestHandle handle);

    /// Gives back the blocks of a request that no later token reads. Null when the handle is stale.
    const Request* retire(RequestHandle handle);

    /// Shares of blocks that the store holds.
    void pin(std::span<const kv_flat::BlockId> blocks) { engine_.transfers.pins.pin(engine_.kv.pool(), blocks); }
    void unpin(std::span<const kv_flat::BlockId> blocks) { engine_.transfers.pins.unpin(blocks); }

    /// Forgets all cached prefixes. False while any block is in use.
    [[nodiscard]] bool reset_prefix_cache();

    /// Forgets all encoder outputs, as the workers do when their weights change.
    void reset_encoder_cache() { engine_.reset_encoder_cache(); }

    [[nodiscard]] const Request* find(RequestHandle handle) const noexcept { return engine_.requests.find(handle); }
    [[nodiscard]] const EngineState& state() const noexcept { return engine_; }
    [[nodiscard]] kv_flat::FlatKv& kv() noexcept { return engine_.kv; }
    [[nodiscard]] PaceControl& pace() noexcept { return engine_.pace; }
    /// In place of the rule of choose_victim.
    void set_victim_choice(VictimChoice choice) { engine_.victim_choice = std::move(choice); }
    /// Requests retracted outside a plan since the last one.
    [[nodiscard]] std::vector<Request*> take_outside_retractions() noexcept {
        return std::exchange(outside_retractions_, {});
    }

    [[nodiscard]] std::uint32_t num_running() const noexcept { return engine_.num_running(); }
    /// Idle sessions, and requests that hold KV without running, among them.
    [[nodiscard]] std::uint32_t num_waiting() const noexcept {
        return engine_.waiting.size() + engine_.num_parked + engine_.num_idle() + num_holding_waiting();
    }
    /// Waiting requests that hold KV: loading, or loaded and without a slot.
    [[nodiscard]] std::uint32_t num_holding_waiting() const noexcept {
        return engine_.transfers.loading.size() + engine_.transfers.loaded.size();
    }

    /// Throws std::logic_error naming the first broken invariant. O(pool): for tests and idle times.
    void check_integrity() const;

  private:
    [[nodiscard]] OrderKey next_order(std::int64_t priority, double arrival_time_s, std::optional<double> rank);
    [[nodiscard]] std::optional<Refusal> refusal_of(std::uint32_t num_tokens) const;
    void note_pace(const ExecutionEvents& events);

    EngineState engine_;
    ExecutionPlan plan_;
    std::vector<Delivery> deliveries_;
    StepRecord last_record_;
    std::vector<Request*> outside_retractions_;
};

}  // namespace tokenspeed::scheduler_fsm
