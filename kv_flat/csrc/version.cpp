// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/version.h"

namespace tokenspeed::kv_flat {

std::string_view core_version() noexcept { return TOKENSPEED_VERSION; }

}  // namespace tokenspeed::kv_flat
