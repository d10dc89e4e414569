// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/version.h"

int main() {
#ifdef TOKENSPEED_ILLEGAL
    tokenspeed::kv_flat::core_version();
#else
    [[maybe_unused]] const auto version = tokenspeed::kv_flat::core_version();
#endif
}
