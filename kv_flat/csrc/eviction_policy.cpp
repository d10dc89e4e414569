// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/eviction_policy.h"

#include <cmath>
#include <stdexcept>

#include "kv_flat/csrc/lru_eviction.h"
#include "kv_flat/csrc/session_eviction.h"

namespace tokenspeed::kv_flat {
namespace {

void check_weight(const char* field, double value, double most) {
    if (value >= 0.0 && value <= most) return;
    throw std::invalid_argument("EvictionSpec." + std::string(field) + " is " + std::to_string(value) +
                                "; it must be from 0 to " + std::to_string(most));
}

}  // namespace

std::unique_ptr<EvictionPolicy> make_eviction_policy(const EvictionSpec& spec, BlockLinks& links) {
    check_weight("idle_scale_s", spec.idle_scale_s, 86400.0);
    check_weight("output_exponent", spec.output_exponent, 4.0);
    check_weight("prompt_exponent", spec.prompt_exponent, 4.0);
    if (spec.name == "lru") return std::make_unique<LruEviction>(links);
    if (spec.name == "session") return std::make_unique<SessionEviction>(spec, links);
    throw std::invalid_argument("EvictionSpec.name is \"" + spec.name + "\"; it must be \"lru\" or \"session\"");
}

}  // namespace tokenspeed::kv_flat
