// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>

#include "kv_flat/csrc/version.h"

PYBIND11_MODULE(_core, module) {
    module.doc() = "C++ control plane of tokenspeed-plugin: request states, scheduling policy and the flat KV manager.";
    module.attr("core_version") = tokenspeed::kv_flat::core_version();
}
