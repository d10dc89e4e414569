// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "kv_flat/csrc/group_spec.h"
#include "scheduler_fsm/csrc/bindings/request_view.h"
#include "scheduler_fsm/csrc/execution_plan.h"

namespace tokenspeed::bindings {

/// Which of vLLM's two runner protocols the rows follow.
struct RunnerProtocol {
    bool resumed_as_new = false;    ///< V2: a resumed request is sent whole, as if it were new
    bool sends_history = false;     ///< V1: ids of a request that was not in the previous step
    bool sends_new_tokens = false;  ///< pipeline parallel without async: the first stage learns sampled ids from us
    bool zeroes_blocks = false;     ///< the workers zero fresh blocks before use
};

/// A plan in the shape of vLLM's SchedulerOutput, column by column; Python only names the columns.
struct PlanColumns {
    std::uint64_t step = 0;
    std::uint32_t num_tokens = 0;
    py::object num_scheduled_tokens;  ///< dict[str, int]
    py::object new_rows;              ///< list[(Request, block_ids, num_computed_tokens, all_token_ids | None)]
    py::object admitted;              ///< list[(Request, num_cached_tokens, num_loaded_tokens)]: running from now on
    // CachedRequestData:
    py::object req_ids;
    py::object resumed_req_ids;
    py::object new_token_ids;
    py::object all_token_ids;
    py::object new_block_ids;
    py::object num_computed_tokens;
    py::object num_output_tokens;
    py::object spec_tokens;              ///< dict[str, list[int]]
    py::object retracted;                ///< list[Request]
    py::object ended;                    ///< list[Request]: the pool is full with them alone
    py::object refused;                  ///< list[Request]: the rate per user has no room for them
    py::object prefetching;              ///< list[Request]: their KV begins to load
    py::object blocks_to_zero;           ///< list[int] | None
    py::object block_copies;             ///< list[(int, int)] | None: source and target
    py::object encoder_inputs;           ///< dict[str, list[int]], None when nothing is encoded
    py::object evicted_encoder_outputs;  ///< list[str], None when nothing goes
    py::object consumed_inputs;          ///< list[(Request, number)], None when there is none
    std::uint32_t num_run_embeds = 0;
    py::object grammar_req_ids;  ///< list[str]: rows that sample under a grammar
    std::uint32_t num_next_drafts = 0;
    bool drafts_are_unused = false;
    bool waits_for_grammar_tokens = false;
    bool has_sync_loads = false;
};

/// Writes one plan. All Python objects of a step are made here, in one pass over its rows.
class PlanWriter {
  public:
    PlanWriter(const RequestViews& views, const RunnerProtocol& protocol,
               const std::vector<kv_flat::GroupSpec>& groups) noexcept
        : views_(views), protocol_(protocol), groups_(groups) {}

    [[nodiscard]] PlanColumns write(const scheduler_fsm::ExecutionPlan& plan) const;

  private:
    [[nodiscard]] bool is_cached_row(const scheduler_fsm::PlanRow& row) const noexcept;
    void write_rows(const scheduler_fsm::ExecutionPlan& plan, PlanColumns& columns) const;
    void write_admitted(const scheduler_fsm::ExecutionPlan& plan, PlanColumns& columns) const;
    void write_new(const scheduler_fsm::ExecutionPlan& plan, PlanColumns& columns) const;
    void write_drafts(const scheduler_fsm::ExecutionPlan& plan, PlanColumns& columns) const;
    void write_encoder_runs(const scheduler_fsm::ExecutionPlan& plan, PlanColumns& columns) const;
    [[nodiscard]] py::object requests(const std::vector<scheduler_fsm::Request*>& list) const;
    [[nodiscard]] py::object block_ids_from(const scheduler_fsm::Request& request, const std::uint32_t* first) const;
    [[nodiscard]] py::object blocks_to_zero(const scheduler_fsm::ExecutionPlan& plan) const;
    [[nodiscard]] static py::object block_copies(const scheduler_fsm::ExecutionPlan& plan);

    const RequestViews& views_;
    const RunnerProtocol& protocol_;
    const std::vector<kv_flat::GroupSpec>& groups_;
};

}  // namespace tokenspeed::bindings
