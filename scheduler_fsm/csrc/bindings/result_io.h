// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <span>
#include <vector>

#include "scheduler_fsm/csrc/bindings/request_view.h"
#include "scheduler_fsm/csrc/execution_plan.h"
#include "scheduler_fsm/csrc/scheduler.h"

namespace tokenspeed::bindings {

/// The sampled tokens of one step, read out of vLLM's ModelRunnerOutput in the order of the plan's rows.
struct SampledTokens {
    std::vector<kv_flat::TokenId> tokens;
    std::vector<std::uint32_t> offsets;
    std::vector<PyObject*> lists;       ///< borrowed, per row: the runner's own list, or null
    std::vector<Py_ssize_t> positions;  ///< per row: its place in the runner's batch, or -1

    void clear();
};

/// How one step's drafts fared, in the terms of vLLM's SpecDecodingStats.
struct DraftTally {
    std::uint32_t num_rows = 0;
    std::uint32_t num_drafts = 0;
    std::uint32_t num_accepted = 0;
    std::vector<std::uint32_t> drafts_by_position;
    std::vector<std::uint32_t> accepted_by_position;

    void add(std::uint32_t drafts, std::uint32_t accepted);
};

/// Reads model output and writes EngineCoreOutputs.
class ResultIo {
  public:
    explicit ResultIo(const RequestViews& views) noexcept : views_(views) {}

    /// vLLM's EngineCoreOutput class.
    void set_output_class(py::object output_class) { output_class_ = std::move(output_class); }

    /// @param sampled list[list[int]], in the order of the runner's batch; may be empty when nothing was sampled
    /// @param req_ids list[str] of that batch
    /// @param positions dict[str, int]: request id -> place in that batch
    void read(const scheduler_fsm::Scheduler& scheduler, const scheduler_fsm::StepRecord& record,
              const py::list& sampled, const py::list& req_ids, const py::dict& positions, SampledTokens& out);

    /// Plain rows become EngineCoreOutputs by client; every other row is handed to Python.
    /// @returns (dict[client, list[EngineCoreOutput]], list[(Request, handle, position, new_token_ids, reason | -1,
    ///          stop token | None, num_drafts, num_accepted)],
    ///          (rows with drafts, drafts, accepted, drafts by position, accepted by position) | None)
    [[nodiscard]] py::tuple write(std::span<const scheduler_fsm::Delivery> deliveries,
                                  const scheduler_fsm::StepRecord& record, const SampledTokens& sampled,
                                  bool all_special) const;

  private:
    /// The row's place in the runner's batch. Most often it is the one of the step before, which costs no search.
    [[nodiscard]] Py_ssize_t position_of(const scheduler_fsm::StepRecord& record, const scheduler_fsm::Request& request,
                                         const py::list& req_ids, const py::dict& positions);
    /// The runner's own list of a row when all of it was delivered, else null.
    [[nodiscard]] PyObject* whole_token_list(const scheduler_fsm::Delivery& delivery,
                                             const SampledTokens& sampled) const noexcept;
    /// Builds the EngineCoreOutput of a plain row.
    void append_output(PyObject* list, const RequestView& view, const scheduler_fsm::Delivery& delivery,
                       const SampledTokens& sampled) const;
    [[nodiscard]] py::object new_token_list(const scheduler_fsm::Delivery& delivery,
                                            const SampledTokens& sampled) const;
    [[nodiscard]] py::tuple special_row(const scheduler_fsm::Delivery& delivery,
                                        const scheduler_fsm::StepRecord& record, const SampledTokens& sampled) const;

    const RequestViews& views_;
    py::object output_class_;
    std::vector<Py_ssize_t> last_positions_;  // by request index
};

}  // namespace tokenspeed::bindings
