// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "kv_flat/csrc/pinned_blocks.h"
#include "scheduler_fsm/csrc/external_kv.h"
#include "scheduler_fsm/csrc/running_set.h"

namespace tokenspeed::scheduler_fsm {

/// Blocks of a retracted request that steps in flight still use.
struct FencedSequence {
    RequestHandle owner;
    std::uint64_t last_step = 0;
    kv_flat::KvSequence kv;
};

/// What the scheduler knows of KV on its way. Empty and unused without a connector.
struct TransferState {
    ExternalKv* store = nullptr;
    bool needs_delivery = false;  ///< the store hands KV on: a request must not end after its blocks were taken away
    OrderedRequests loading;      ///< Prefetching
    OrderedRequests loaded;       ///< Prefetched
    std::deque<RequestHandle> undecided;
    std::vector<FencedSequence> fenced;
    std::uint32_t num_draining = 0;
    std::uint64_t num_unknown_reports = 0;  ///< of transfers that nobody waits for
    kv_flat::PinnedBlocks pins;

    /// Blocks that become free once the steps in flight are back.
    [[nodiscard]] std::uint32_t num_fenced_blocks() const noexcept {
        std::uint32_t sum = 0;
        for (const FencedSequence& sequence : fenced) sum += sequence.kv.num_held_blocks();
        return sum;
    }
};

struct EngineState;

/// The moves of requests whose KV is on its way.
class Transfers {
  public:
    explicit Transfers(EngineState& engine) noexcept : engine_(engine) {}

    /// A waiting request starts to load. It leaves the queue.
    void prefetch(Request& request, kv_flat::KvSequence&& kv);

    /// A waiting request is not admitted before the connector has decided; it is put aside until the next step.
    void put_aside(Request& request);
    void take_undecided_back();

    /// The connector reports the end of a load. False when nobody waits for it.
    bool load_done(Request& request);

    /// A loaded request runs. @pre a slot is free
    void start_loaded(Request& request);

    /// The connector reports that nothing of a load is valid.
    void fail_load(Request& request) noexcept;

    /// A request that holds KV ends.
    void drain(Request& request, FinishReason why);

    /// The connector was told of the end of a request.
    void set_verdict(Request& request, bool awaits_send);

    /// The connector reports the end of a send. False when nobody waits for it.
    bool send_done(Request& request);

    /// Gives an ended request's blocks back, and forgets it, when nobody uses them any more.
    void settle(Request& request);

    /// Gives blocks back whose steps are not in flight any more.
    void release_fenced();

    /// Blocks whose load failed: they, and what was computed from them, can no longer be hit.
    /// @returns running requests that read one of them; their results of steps in flight are worth nothing
    [[nodiscard]] std::vector<Request*> invalidate(std::span<const kv_flat::BlockId> blocks);

  private:
    void give_up_load(Request& request);

    EngineState& engine_;
};

}  // namespace tokenspeed::scheduler_fsm
