// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>

#include "kv_flat/csrc/flat_kv.h"
#include "kv_flat/csrc/isolation_watch.h"
#include "scheduler_fsm/csrc/execution_plan.h"
#include "scheduler_fsm/csrc/pace/pace_control.h"
#include "scheduler_fsm/csrc/request_slot.h"
#include "scheduler_fsm/csrc/request_table.h"
#include "scheduler_fsm/csrc/running_set.h"
#include "scheduler_fsm/csrc/scheduler_config.h"
#include "scheduler_fsm/csrc/transfers.h"
#include "scheduler_fsm/csrc/victim_choice.h"
#include "scheduler_fsm/csrc/waiting_queue.h"

namespace tokenspeed::scheduler_fsm {

/// Counts since start. Each is a fact about admissions, never about attempts.
struct Counters {
    std::uint64_t num_cache_requests = 0;  ///< first admissions that read the cache
    std::uint64_t num_cache_queried_tokens = 0;
    std::uint64_t num_cache_hit_tokens = 0;
    std::uint64_t num_readmissions = 0;  ///< the same three for requests that come back after a retraction
    std::uint64_t num_readmission_queried_tokens = 0;
    std::uint64_t num_readmission_hit_tokens = 0;
    // Tokens computed again at an admission: had been evicted; were cached, but not up to where a match may end;
    // lacked the part of a group that keeps less than everything; were cached under another salt or adapter.
    std::uint64_t num_evicted_hit_tokens = 0;
    std::uint64_t num_granularity_lost_tokens = 0;
    std::uint64_t num_missing_state_tokens = 0;
    std::uint64_t num_isolated_tokens = 0;
    std::uint64_t num_cache_lookups = 0;  ///< prefix lookups, admitted or not
    std::uint64_t num_retractions = 0;
    std::uint64_t num_block_copies = 0;      ///< blocks copied because a match ended inside them
    std::uint64_t num_stateless_tokens = 0;  ///< cached in all groups but those with states, and computed again
    std::uint64_t num_lost_checkpoints = 0;  ///< states that others might have used, given up for lack of a block
    std::uint64_t num_coarsened_tokens = 0;  ///< cached, but computed again: there was no block for a copy
    std::uint64_t num_late_rows = 0;         ///< results for requests that were gone
    std::uint64_t num_unknown_steps = 0;     ///< results for steps that were not in flight
};

/// Everything the scheduler knows, and the few moves that keep its parts in step with each other.
/// A request is in exactly one place: waiting, parked, loading, loaded, decoding, prefilling, idle or finished.
struct EngineState {
    explicit EngineState(SchedulerConfig checked_config)
        : config(std::move(checked_config)),
          kv(config.kv),
          isolation(kv.max_keys()),
          slots(config.max_num_seqs),
          encoder_cache(config.encoder.cache_embeds),
          adapters(config.max_adapters),
          pace(config.target_tps, config.overload, GraphSizes(config.graph_sizes)) {}

    SchedulerConfig config;
    // Requests hold blocks, slots and encoder outputs, so the table is destroyed before the pools.
    kv_flat::FlatKv kv;
    kv_flat::IsolationWatch isolation;
    SlotPool slots;
    EncoderCache encoder_cache;
    RequestTable requests;

    WaitingQueue waiting;
    std::uint32_t num_parked = 0;  ///< without KV and not waiting: not ready yet, or retracted and with steps in flight
                                   ///< or without input
    OrderedRequests decoding;
    OrderedRequests prefilling;
    std::vector<Request*> idle;            ///< sessions that hold KV between two turns, the longest idle first
    std::uint32_t num_awaiting_input = 0;  ///< sessions between two turns, with KV or without
    AdapterUse adapters;
    TransferState transfers;
    std::vector<Request*> encoder_holders;  ///< requests that hold encoder outputs
    PaceControl pace;
    VictimChoice victim_choice;  ///< of another distribution; empty: ours

    std::uint64_t step = 0;
    std::deque<StepRecord> in_flight;
    std::vector<CopyPin> copy_pins;       ///< of steps in flight
    std::uint64_t prefilled_tokens = 0;   ///< the clock of the short lane
    bool prefill_bound = false;           ///< the last prefill pass could not take everybody who wanted in
    std::uint64_t num_full_steps = 0;     ///< planned steps that were not empty
    std::uint64_t next_prefill_step = 0;  ///< no prefill before there were so many, while something decodes
    std::uint64_t last_prefill_step = 0;  ///< the last step with a prefill pass
    std::uint32_t lane_tokens = 0;        ///< what somebody in the short lane needed at once, and did not get
    std::uint32_t kept_tokens = 1;        ///< what decodes leave to prefills that wait: more after one needed more
    std::uint64_t next_sequence = 0;
    Counters counters;

    [[nodiscard]] std::uint32_t num_running() const noexcept { return decoding.size() + prefilling.size(); }
    [[nodiscard]] std::uint32_t num_idle() const noexcept { return static_cast<std::uint32_t>(idle.size()); }
    /// Whether a slot is free or held by an idle session, which gives it up when asked.
    [[nodiscard]] bool has_slot() const noexcept { return slots.num_free() + num_idle() > 0; }

    /// Puts a request that is neither running nor finished where it belongs now.
    void enqueue(Request& request);
    /// Takes a request out of wherever it is, keeping its state.
    void dequeue(Request& request);

    void admit(Request& request, kv_flat::KvSequence&& kv_sequence);
    /// Books a request that has just become Prefilling.
    void note_admission(Request& request);
    void start_decoding(Request& request);
    void end_turn(Request& request);
    void start_turn(Request& request, TurnInput input, OrderKey order);
    void retract(Request& request);
    void finish(Request& request, FinishReason why);
    /// What the eviction policy is told when the request's blocks are given back for good.
    [[nodiscard]] static kv_flat::Departure departure_of(const Request& request) noexcept {
        return {request.num_prompt_tokens, request.num_output_tokens(), request.hints};
    }

    /// The request computes no further: what states it has left behind become hittable.
    void publish_states(Request& request);

    /// Moves the copies that a sequence waits for into a step.
    void plan_copies(kv_flat::KvSequence& sequence, ExecutionPlan& plan);

    /// What the workers keep of encoder outputs is void (new weights); whoever still needs some has them encoded again.
    void reset_encoder_cache();

    /// A request whose last step in flight came back may wait for admission again.
    void unpark_if_drained(Request& request);

  private:
    void give_blocks_up(Request& request);
    void drop_encoder_outputs(Request& request);
    [[nodiscard]] static bool may_wait(const Request& request) noexcept {
        return request.ready && request.num_in_flight_tokens == 0 && !request.awaits_input && !request.load.undecided;
    }
};

}  // namespace tokenspeed::scheduler_fsm
