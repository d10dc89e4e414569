// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "scheduler_fsm/csrc/request.h"

namespace tokenspeed::scheduler_fsm {

enum class RowKind : std::uint8_t {
    kFirst,    ///< a worker sees the request for the first time
    kResumed,  ///< it comes back after a retraction, with a new table
    kRunning,  ///< its table only grew
};

/// What one request does in one step.
///
/// It repeats what writers need of the request: by the time they come, a thousand requests have left the caches.
struct PlanRow {
    Request* request = nullptr;
    RequestHandle handle;
    RowKind kind = RowKind::kRunning;
    bool samples = false;         ///< the step reaches the request's last token, so it yields at least one new one
    bool needs_history = false;   ///< the worker may have dropped its copy of the ids: it was not in the previous step
    bool has_new_blocks = false;  ///< in some group, or its table is new and not empty
    std::uint32_t num_tokens = 0;
    std::uint32_t num_computed_tokens = 0;  ///< before the step
    std::uint32_t num_output_tokens = 0;    ///< delivered before the step
    std::uint32_t num_placeholders = 0;     ///< before the step: sampled on the device, ids not delivered
    std::uint32_t num_drafts = 0;           ///< the last tokens of the step that are drafts
    std::uint32_t num_cached_tokens = 0;    ///< kFirst, kResumed: served by the prefix cache
    std::uint32_t num_loaded_tokens = 0;    ///< kFirst, kResumed: served by a connector
    std::uint32_t num_warm_tokens = 0;      ///< kFirst, kResumed: in its blocks already, so these are not to be zeroed
};

/// A whole block that the workers copy before anything else of the step.
struct PlannedCopy {
    kv_flat::BlockId source = kv_flat::kNullBlock;
    kv_flat::BlockId target = kv_flat::kNullBlock;
};

/// An encoder input of a plan.
struct PlannedInput {
    Request* request = nullptr;
    std::uint32_t number = 0;  ///< in the order in which the request's inputs arrived
};

/// One step. Valid until the next call into the scheduler.
struct ExecutionPlan {
    std::uint64_t step = 0;
    std::vector<PlanRow> rows;
    std::uint32_t num_tokens = 0;
    std::vector<TokenId> drafts;                  ///< of all rows, in row order
    std::vector<std::uint32_t> first_new_blocks;  ///< per row and group: table column where the new blocks begin; of
                                                  ///< a row without new blocks nothing that means anything
    bool has_new_tables = false;                  ///< some row is not kRunning
    std::vector<PlannedCopy> copies;
    std::uint32_t num_next_drafts = 0;                 ///< tokens that drafters propose per request after this step
    bool drafts_are_unused = false;                    ///< no row can use what a drafter would propose: it may rest
    std::vector<PlannedInput> encoder_runs;            ///< what the worker encodes, by request
    std::uint32_t num_run_embeds = 0;                  ///< embeddings of these
    std::vector<PlannedInput> consumed_inputs;         ///< what no step from this one on encodes
    std::vector<std::string> evicted_encoder_outputs;  ///< identifiers; the worker drops them before it runs the step
    std::vector<Request*> retracted;
    std::vector<Request*> ended;        ///< finished by the plan itself: they fill the pool alone
    std::vector<Request*> refused;      ///< finished by the plan itself: there is no room for them within the rate
    std::vector<Request*> prefetching;  ///< their KV begins to load; they have no row
    bool has_sync_loads = false;        ///< KV is loaded as a part of the step

    void clear() {
        rows.clear();
        num_tokens = 0;
        drafts.clear();
        first_new_blocks.clear();
        has_new_tables = false;
        copies.clear();
        num_next_drafts = 0;
        drafts_are_unused = false;
        encoder_runs.clear();
        num_run_embeds = 0;
        consumed_inputs.clear();
        evicted_encoder_outputs.clear();
        retracted.clear();
        ended.clear();
        refused.clear();
        prefetching.clear();
        has_sync_loads = false;
    }
};

/// What `advance` remembers of a planned step.
struct StepRecord {
    struct Row {
        RequestHandle handle;
        std::uint32_t incarnation = 0;
        std::uint32_t turn = 0;
        std::uint32_t num_tokens = 0;
        std::uint32_t num_drafts = 0;
        bool samples = false;
    };
    std::uint64_t step = 0;
    std::vector<Row> rows;
};

/// One end of a copy, owned until the results of its step are in.
struct CopyPin {
    std::uint64_t step = 0;
    kv_flat::BlockRef block;
};

/// The results of one step: tokens of row i are tokens[offsets[i], offsets[i + 1]).
struct ExecutionEvents {
    std::uint64_t step = 0;
    std::span<const TokenId> tokens;
    std::span<const std::uint32_t> offsets;
    double now_s = 0;  ///< when they came, on the clock of StepOptions::now_s
};

/// What one request got from one step.
struct Delivery {
    std::uint32_t row = 0;  ///< row of the step's record
    Request* request = nullptr;
    std::uint32_t num_new_tokens = 0;  ///< the last ones of its output
    std::uint32_t num_accepted_drafts = 0;
    bool has_news =
        false;  ///< something besides tokens happened since its last delivery (first output, retraction, readmission)
    bool finished = false;
    Stop stop;
};

}  // namespace tokenspeed::scheduler_fsm
