// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace tokenspeed::kv_flat {

/// Version the core was compiled from. The Python side compares it with its own, so a stale build is noticed at load.
[[nodiscard]] std::string_view core_version() noexcept;

}  // namespace tokenspeed::kv_flat
