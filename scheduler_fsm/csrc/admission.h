// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "scheduler_fsm/csrc/idle_sessions.h"
#include "scheduler_fsm/csrc/pace/pace_gate.h"
#include "scheduler_fsm/csrc/prefix_leader.h"
#include "scheduler_fsm/csrc/step_builder.h"

namespace tokenspeed::scheduler_fsm {

/// Decides which waiting requests start. A request starts only when its whole known sequence fits into what is free and
/// not promised; one that does not fit is passed over, a bounded number of times, and asked again only when the answer
/// may have changed.
class Admission {
  public:
    Admission(StepBuilder& step, ExecutionPlan& plan, PaceGate& pace) noexcept
        : step_(step), plan_(plan), idle_(step), leaders_(step.engine), pace_(pace) {}

    /// Retracts strictly less urgent requests when, and only when, that lets the most urgent waiting request start.
    void displace();

    /// False once nothing more can start in this step, whoever asks.
    [[nodiscard]] bool is_open() const;

    /// Notes that a request could not start in this step; others may overtake it, but not for ever.
    void pass_over(Request& request);

    /// Gives slots to requests whose KV was loaded, in the total order.
    void start_loaded();

    /// True when the request runs now. It has no row yet.
    [[nodiscard]] bool try_start(Request& request);

    /// Ages the requests that others overtook in this step.
    void close();

  private:
    [[nodiscard]] bool may_try(const Request& request) const;
    [[nodiscard]] bool answer_may_differ(const Request& request, std::uint32_t limit) const;
    [[nodiscard]] std::uint32_t free_block_limit(const Request& request) const;
    [[nodiscard]] kv_flat::Match probe(const Request& request,
                                       kv_flat::MatchEnd end = kv_flat::MatchEnd::kLogicalBlock);
    [[nodiscard]] std::uint32_t blocks_needed(const Request& request, const kv_flat::Match& match) const;
    [[nodiscard]] bool can_encode(const Request& request, std::uint32_t num_computed_tokens);
    [[nodiscard]] bool has_slot() const;
    /// False when it has to wait for memory. True also when it loads first, or waits for the store's answer or for the
    /// prefix that another computes.
    [[nodiscard]] bool start_if_it_fits(Request& request);
    void remember_failure(Request& request, std::uint32_t num_cached_tokens, std::uint32_t needed_blocks,
                          std::uint32_t num_idle_blocks);
    [[nodiscard]] ExternalKv::Offer ask_store(const Request& request, const kv_flat::Match& match, bool fits) const;
    void start(Request& request, const kv_flat::Match& match, const ExternalKv::Offer& offer);
    [[nodiscard]] bool make_slot(const Request& request);
    void count_cache_use(Request& request, const kv_flat::Match& match, std::uint32_t num_loaded_tokens);
    /// @param num_explained_tokens leading tokens that are cached, or known to be lost for another reason
    void count_isolation(Request& request, std::uint32_t num_explained_tokens);

    StepBuilder& step_;
    ExecutionPlan& plan_;
    IdleSessions idle_;
    PrefixLeaders leaders_;
    PaceGate& pace_;
    std::vector<Request*> passed_over_;
    std::uint32_t num_followers_ = 0;  // wait for the prefix of another
    std::uint32_t num_started_after_first_pass_over_ = 0;
    bool closed_for_all_ = false;
    bool closed_for_new_ = false;
};

}  // namespace tokenspeed::scheduler_fsm
