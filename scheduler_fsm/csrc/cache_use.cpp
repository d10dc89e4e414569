// SPDX-License-Identifier: Apache-2.0
// What an admission found in the prefix cache, and why it did not find more.
#include <algorithm>

#include "scheduler_fsm/csrc/admission.h"

namespace tokenspeed::scheduler_fsm {

void Admission::count_isolation(Request& request, std::uint32_t num_explained_tokens) {
    if (request.content_marks.empty()) return;
    const std::uint32_t key_tokens = request.chain.key_tokens();
    // The last token is always computed, whoever else knows it.
    const std::size_t num_reusable = (request.num_known_tokens() - 1) / key_tokens;
    request.content_marks.resize(std::min(request.content_marks.size(), num_reusable));
    const std::uint32_t num_keys =
        step_.engine.isolation.note(request.content_marks, request.chain.root(), num_explained_tokens / key_tokens);
    step_.engine.counters.num_isolated_tokens += std::uint64_t{num_keys} * key_tokens;
    request.content_marks = {};
}

void Admission::count_cache_use(Request& request, const kv_flat::Match& match, std::uint32_t num_loaded_tokens) {
    if (!request.may_read_cache || !step_.engine.kv.config().prefix_caching) return;
    Counters& counters = step_.engine.counters;
    const std::uint32_t num_found_tokens = match.num_tokens + num_loaded_tokens;
    const kv_flat::LostTokens lost =
        step_.engine.kv.lost_tokens(request.chain.keys(), request.num_known_tokens() - 1, num_found_tokens);
    counters.num_evicted_hit_tokens += lost.num_evicted;
    counters.num_granularity_lost_tokens += lost.num_granularity;
    counters.num_missing_state_tokens += lost.num_missing_state;
    count_isolation(request, num_found_tokens + lost.num_evicted + lost.num_granularity + lost.num_missing_state);
    if (request.num_retractions > 0) {
        ++counters.num_readmissions;
        counters.num_readmission_queried_tokens += request.num_known_tokens();
        counters.num_readmission_hit_tokens += match.num_tokens;
    } else {
        ++counters.num_cache_requests;
        counters.num_cache_queried_tokens += request.num_known_tokens();
        counters.num_cache_hit_tokens += match.num_tokens;
    }
}

}  // namespace tokenspeed::scheduler_fsm
