// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include "kv_flat/csrc/version.h"

TEST_CASE("the core carries the version of the Python package") {
    CHECK(tokenspeed::kv_flat::core_version() == EXPECTED_VERSION);
}
