// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "scheduler_fsm/csrc/bindings/plan_writer.h"
#include "scheduler_fsm/csrc/bindings/request_view.h"
#include "scheduler_fsm/csrc/bindings/result_io.h"
#include "scheduler_fsm/csrc/bindings/transfers.h"
#include "scheduler_fsm/csrc/scheduler.h"

namespace tokenspeed::bindings {

/// A request that can never run. The message is for its client.
class RefusedRequest : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

/// The scheduler as Python sees it: the core, and the few Python objects that each request drags along.
class Core {
  public:
    Core(scheduler_fsm::SchedulerConfig config, RunnerProtocol protocol, py::object output_class);

    /// Throws RefusedRequest.
    std::uint64_t submit(scheduler_fsm::RequestSpec spec, RequestView view);
    /// Throws RefusedRequest. Returns all tokens of the session, list[int]: its prompt from now on.
    py::object feed(std::uint64_t handle, scheduler_fsm::TurnInput input, bool is_plain, bool has_grammar);
    void open_gate(std::uint64_t handle) { scheduler_.open_gate(unpack(handle)); }

    /// `now_s` is read only with a rate per user.
    [[nodiscard]] PlanColumns plan(scheduler_fsm::PauseLevel pause, bool throttle_prefills, double now_s);
    /// @returns what ResultIo::write returns, or None for a step that is not in flight
    [[nodiscard]] py::object advance(std::uint64_t step, const py::list& sampled, const py::list& req_ids,
                                     const py::dict& positions, bool all_special, double now_s);

    bool finish(std::uint64_t handle, scheduler_fsm::FinishReason why) {
        return scheduler_.finish(unpack(handle), why);
    }
    void release(std::uint64_t handle);
    void set_drafts(std::uint64_t handle, const py::list& drafts);

    /// The requests whose KV it took.
    [[nodiscard]] py::list retract_all();
    [[nodiscard]] bool reset_prefix_cache() { return scheduler_.reset_prefix_cache(); }
    void reset_encoder_cache() { scheduler_.reset_encoder_cache(); }

    /// list[(kind, group, block_tokens, key, parent key | None, token ids)] since the last call
    [[nodiscard]] py::list drain_kv_events();
    /// list[(lifetime, idle time, gaps between hits)] in seconds, since the last call
    [[nodiscard]] py::list drain_block_lives();
    [[nodiscard]] py::dict counters() const;
    /// The step-time model and what it limited.
    [[nodiscard]] py::dict pace() const;
    /// Whether steps are to be measured: somebody has a rate.
    [[nodiscard]] bool is_paced() const noexcept { return scheduler_.state().pace.is_on(); }
    /// Asks a Python function how many prompt tokens may share a step.
    void set_chunk_budget(py::function budget);
    /// Asks a Python function who is retracted for lack of blocks.
    void set_victim_choice(py::function choice);

    // With a connector (transfers.cpp).
    void attach_connector(py::object offer, py::object accept, bool needs_delivery);
    void let_go(std::uint64_t handle, bool awaits_send);
    /// A request's whole table: tuple[list[int], ...] by group. Throws KeyError.
    [[nodiscard]] py::tuple block_ids(std::uint64_t handle) const;
    /// (computed tokens, table of these). Blocks that no later token reads are given back first. Throws KeyError.
    [[nodiscard]] py::tuple computed(std::uint64_t handle);
    /// list[Request] that read one of these blocks
    [[nodiscard]] py::list invalidate(const std::vector<kv_flat::BlockId>& blocks);

    [[nodiscard]] scheduler_fsm::Scheduler& scheduler() noexcept { return scheduler_; }
    [[nodiscard]] const scheduler_fsm::Scheduler& scheduler() const noexcept { return scheduler_; }

  private:
    RequestViews views_;
    std::unique_ptr<ConnectorCallbacks> connector_;  // outlives the scheduler
    scheduler_fsm::Scheduler scheduler_;
    RunnerProtocol protocol_;
    PlanWriter writer_;
    ResultIo results_;
    SampledTokens sampled_;  // kept for its capacity
};

}  // namespace tokenspeed::bindings
