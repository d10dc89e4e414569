// SPDX-License-Identifier: Apache-2.0
// What HostedKv tells of itself: what an admission did not find, who holds blocks, what a match found.
#include <algorithm>
#include <utility>

#include "scheduler_fsm/csrc/bindings/hosted_kv.h"

namespace tokenspeed::bindings {

using kv_flat::GroupId;
using kv_flat::GroupSpec;

void HostedKv::count_admission(Held& held, const Growth& growth, std::uint32_t num_known_tokens) {
    // One that was never looked up may not read the cache.
    if (held.matched_at == 0 || !kv_.config().prefix_caching) return;
    const std::uint32_t key_tokens = kv_.config().key_tokens;
    const std::uint32_t num_found = growth.num_hit + growth.num_external;
    const std::uint32_t num_reusable = std::max(num_known_tokens, 1U) - 1;
    const kv_flat::LostTokens lost = kv_.lost_tokens(held.prompt.chain.keys(), num_reusable, num_found);
    counters_.num_evicted_hit_tokens += lost.num_evicted;
    counters_.num_granularity_lost_tokens += lost.num_granularity;
    counters_.num_missing_state_tokens += lost.num_missing_state;
    std::vector<std::uint32_t> marks = std::exchange(held.prompt.content_marks, {});
    if (marks.empty()) return;
    marks.resize(std::min<std::size_t>(marks.size(), num_reusable / key_tokens));
    const std::uint32_t num_explained = num_found + lost.num_evicted + lost.num_granularity + lost.num_missing_state;
    const std::uint32_t num_keys = isolation_.note(marks, held.prompt.chain.root(), num_explained / key_tokens);
    counters_.num_isolated_tokens += std::uint64_t{num_keys} * key_tokens;
}

std::vector<KvHolder> HostedKv::holders() const {
    std::vector<KvHolder> holders;
    for (const auto& [id, held] : held_)
        if (held.kv) holders.push_back({&id, held.number, held.hints.session, held.num_computed, &*held.kv});
    return holders;
}

void HostedKv::record_match(const std::string& id) {
    const Held& held = at(id);
    const std::uint32_t key_tokens = kv_.config().key_tokens;
    const kv_flat::KeyChain& chain = held.prompt.chain;
    const std::vector<GroupSpec>& groups = kv_.config().groups;
    for (GroupId group = 0; group < groups.size(); ++group) {
        for (std::uint32_t unit = 0; unit < held.match.num_tokens / key_tokens; ++unit) {
            if (held.match.blocks[group][unit * key_tokens / groups[group].block_tokens] == kv_flat::kNullBlock)
                continue;
            kv_.record_stored(chain, held.prompt.tokens, group, unit);
        }
    }
}

}  // namespace tokenspeed::bindings
