// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include "kv_flat/csrc/block_pool.h"

namespace tokenspeed::bindings {

namespace py = pybind11;

/// list[(kind, group, block_tokens, key, parent key | None, token ids)] since the last call
[[nodiscard]] py::list drain_kv_events(kv_flat::BlockPool& pool);

/// list[(lifetime, idle time, gaps between hits)] in seconds, since the last call
[[nodiscard]] py::list drain_block_lives(kv_flat::BlockPool& pool);

}  // namespace tokenspeed::bindings
