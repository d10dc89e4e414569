// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

#include "scheduler_fsm/csrc/engine_state.h"

namespace tokenspeed::bindings {

namespace py = pybind11;

/// Somebody who holds blocks, as the reports see him.
struct KvHolder {
    const std::string* label;  ///< the client's request id
    std::uint32_t number;      ///< no two holders have the same
    std::uint64_t session;     ///< 0: not known
    std::uint32_t num_computed_tokens;
    const kv_flat::KvSequence* kv;
};

[[nodiscard]] std::vector<KvHolder> holders_of(const scheduler_fsm::EngineState& engine);

/// dict[str, float]: blocks by state (`free`, `cached`, `pinned`, `in_use`), and `fragmentation`, the share of the
/// blocks in use that holds no token yet. O(holders).
[[nodiscard]] py::dict kv_gauges(const kv_flat::FlatKv& kv, const std::vector<KvHolder>& holders);

/// The whole pool at this moment, column by column: dict with an entry of little-endian bytes per column, one value per
/// block, the null block included (columns and their types: kv_flat/kv_map.py), and `requests`, a list of (label,
/// number in the column `run`, session, computed tokens) of everybody who holds KV. O(pool): for pictures.
[[nodiscard]] py::dict kv_map(const kv_flat::FlatKv& kv, const std::vector<KvHolder>& holders);

}  // namespace tokenspeed::bindings
