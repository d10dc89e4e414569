// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include "kv_flat/csrc/block_pool.h"

namespace tokenspeed::bindings {

namespace py = pybind11;

/// EvictionSpec and SessionHints for Python.
void bind_eviction(py::module_& module);

/// Evictions and cached blocks by kind, and blank blocks.
[[nodiscard]] py::dict eviction_counts(const kv_flat::BlockPool& pool);

}  // namespace tokenspeed::bindings
