// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include "scheduler_fsm/csrc/engine_state.h"

namespace tokenspeed::bindings {

namespace py = pybind11;

/// The question that a chunk budget written in Python gets. Valid during the call only.
struct PyChunkQuestion {
    const scheduler_fsm::ChunkQuestion& question;
    const scheduler_fsm::StepTimeModel& model;
};

/// Registers the question's class.
void bind_pace(py::module_& module);

/// A chunk budget that asks a Python function; an answer that is no number of tokens raises ValueError.
[[nodiscard]] scheduler_fsm::ChunkBudget python_chunk_budget(py::function budget);

/// Model, error and limits as a dictionary.
[[nodiscard]] py::dict pace_report(const scheduler_fsm::PaceControl& pace);

/// A profile's figures by name.
[[nodiscard]] py::dict profile_figures(const scheduler_fsm::PaceControl& pace);

/// Begins with a profile's figures by name; all of them are there.
void start_from_figures(scheduler_fsm::PaceControl& pace, const py::dict& figures);

/// list[(decodes, prompt tokens, steps, predicted, measured, |predicted - measured|)]: shapes by the number of their
/// class, sums of milliseconds.
[[nodiscard]] py::list step_classes(const scheduler_fsm::PaceControl& pace);

/// Running users whose next token was due before `now_s`. O(running requests).
[[nodiscard]] std::uint32_t users_below_target(const scheduler_fsm::EngineState& engine, double now_s);

}  // namespace tokenspeed::bindings
