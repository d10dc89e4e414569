// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include "scheduler_fsm/csrc/engine_state.h"

namespace tokenspeed::bindings {

namespace py = pybind11;

/// dict[str, float]: blocks by state (`free`, `cached`, `pinned`, `in_use`), and `fragmentation`, the share of the
/// blocks in use that holds no token yet. O(requests that hold KV).
[[nodiscard]] py::dict kv_gauges(const scheduler_fsm::EngineState& engine);

/// The whole pool at this moment, column by column: dict with an entry of little-endian bytes per column, one value per
/// block, the null block included (columns and their types: kv_flat/kv_map.py), and `requests`, a list of (label,
/// number in the column `run`, session, computed tokens) of everybody who holds KV. O(pool): for pictures.
[[nodiscard]] py::dict kv_map(const scheduler_fsm::EngineState& engine);

}  // namespace tokenspeed::bindings
