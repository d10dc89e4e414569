// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include "scheduler_fsm/csrc/victim_choice.h"

namespace tokenspeed::bindings {

namespace py = pybind11;

/// Registers the class that a victim choice written in Python gets.
void bind_policies(py::module_& module);

/// A victim choice that asks a Python function; an answer that is no index of a candidate raises ValueError.
[[nodiscard]] scheduler_fsm::VictimChoice python_victim_choice(py::function choice);

}  // namespace tokenspeed::bindings
