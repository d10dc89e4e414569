// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/bindings/core.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>

#include "scheduler_fsm/csrc/bindings/pace_io.h"
#include "scheduler_fsm/csrc/bindings/policy_io.h"
#include "scheduler_fsm/csrc/bindings/pool_reports.h"
#include "scheduler_fsm/csrc/bindings/prompt.h"
#include "scheduler_fsm/csrc/bindings/py_handle.h"

namespace tokenspeed::bindings {

using scheduler_fsm::Request;
using scheduler_fsm::RequestHandle;

Core::Core(scheduler_fsm::SchedulerConfig config, RunnerProtocol protocol, py::object output_class)
    : scheduler_(std::move(config)),
      protocol_(protocol),
      writer_(views_, protocol_, scheduler_.state().kv.config().groups),
      results_(views_) {
    results_.set_output_class(std::move(output_class));
}

std::uint64_t Core::submit(scheduler_fsm::RequestSpec spec, RequestView view) {
    auto outcome = scheduler_.submit(std::move(spec));
    if (const auto* refusal = std::get_if<scheduler_fsm::Refusal>(&outcome)) throw RefusedRequest(refusal->message);
    const auto handle = std::get<RequestHandle>(outcome);
    views_.put(handle, std::move(view));
    return pack(handle);
}

py::object Core::feed(std::uint64_t handle, scheduler_fsm::TurnInput input, bool is_plain, bool has_grammar) {
    if (const auto refusal = scheduler_.feed(unpack(handle), std::move(input))) throw RefusedRequest(refusal->message);
    RequestView& view = views_.at(unpack(handle));
    view.is_plain = is_plain;
    view.has_grammar = has_grammar;
    return int_list(scheduler_.find(unpack(handle))->tokens.all());
}

PlanColumns Core::plan(scheduler_fsm::PauseLevel pause, bool throttle_prefills, double now_s) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    scheduler_.kv().pool().set_time(std::chrono::duration<double>(now).count());
    return writer_.write(scheduler_.plan({pause, throttle_prefills, now_s}));
}

py::object Core::advance(std::uint64_t step, const py::list& sampled, const py::list& req_ids,
                         const py::dict& positions, bool all_special, double now_s) {
    const auto& in_flight = scheduler_.state().in_flight;
    const auto found = std::ranges::find(in_flight, step, &scheduler_fsm::StepRecord::step);
    if (found == in_flight.end()) {
        static_cast<void>(scheduler_.advance({step, {}, {}, now_s}));  // counted
        return py::none();
    }
    results_.read(scheduler_, *found, sampled, req_ids, positions, sampled_);
    const auto deliveries = scheduler_.advance({step, sampled_.tokens, sampled_.offsets, now_s});
    return results_.write(deliveries, scheduler_.last_record(), sampled_, all_special);
}

void Core::release(std::uint64_t handle) {
    scheduler_.release(unpack(handle));
    views_.drop(unpack(handle));
}

void Core::set_drafts(std::uint64_t handle, const py::list& drafts) {
    // Drafters pad with -1: what stands behind the first one is no proposal.
    std::vector<kv_flat::TokenId> tokens;
    for (const auto& draft : drafts) {
        const auto token = draft.cast<kv_flat::TokenId>();
        if (token < 0) break;
        tokens.push_back(token);
    }
    scheduler_.set_drafts(unpack(handle), tokens);
}

py::list Core::retract_all() {
    scheduler_.retract_all();
    py::list requests;
    for (const Request* request : scheduler_.take_outside_retractions()) requests.append(views_.of(*request).request);
    return requests;
}

py::list Core::drain_kv_events() { return bindings::drain_kv_events(scheduler_.kv().pool()); }

py::list Core::drain_block_lives() { return bindings::drain_block_lives(scheduler_.kv().pool()); }

py::dict Core::pace() const { return pace_report(scheduler_.state().pace); }

void Core::set_chunk_budget(py::function budget) {
    scheduler_.pace().set_chunk_budget(python_chunk_budget(std::move(budget)));
}

void Core::set_victim_choice(py::function choice) {
    scheduler_.set_victim_choice(python_victim_choice(std::move(choice)));
}

py::dict Core::counters() const {
    const auto& counters = scheduler_.state().counters;
    const kv_flat::BlockPool& pool = scheduler_.state().kv.pool();
    py::dict values;
    values["cache_requests"] = counters.num_cache_requests;
    values["cache_queried_tokens"] = counters.num_cache_queried_tokens;
    values["cache_hit_tokens"] = counters.num_cache_hit_tokens;
    values["readmissions"] = counters.num_readmissions;
    values["readmission_queried_tokens"] = counters.num_readmission_queried_tokens;
    values["readmission_hit_tokens"] = counters.num_readmission_hit_tokens;
    values["cache_lookups"] = counters.num_cache_lookups;
    values["retractions"] = counters.num_retractions;
    values["block_copies"] = counters.num_block_copies;
    values["coarsened_tokens"] = counters.num_coarsened_tokens;
    values["stateless_tokens"] = counters.num_stateless_tokens;
    values["lost_checkpoints"] = counters.num_lost_checkpoints;
    values["late_rows"] = counters.num_late_rows;
    values["unknown_steps"] = counters.num_unknown_steps;
    const scheduler_fsm::EncoderCache& encoders = scheduler_.state().encoder_cache;
    values["encoder_runs"] = encoders.counters().num_runs;
    values["encoder_run_embeds"] = encoders.counters().num_run_embeds;
    values["encoder_shared"] = encoders.counters().num_shared;
    values["encoder_evictions"] = encoders.counters().num_evictions;
    values["encoder_held_embeds"] = encoders.num_held_embeds();
    values["evicted_hit_tokens"] = counters.num_evicted_hit_tokens;
    values["granularity_lost_tokens"] = counters.num_granularity_lost_tokens;
    values["missing_state_tokens"] = counters.num_missing_state_tokens;
    values["isolated_tokens"] = counters.num_isolated_tokens;
    values["evictions"] = pool.num_evictions();
    values["usable_blocks"] = pool.num_usable();
    values["free_blocks"] = pool.num_free();
    values["cached_blocks"] = pool.num_cached();
    return values;
}

}  // namespace tokenspeed::bindings
