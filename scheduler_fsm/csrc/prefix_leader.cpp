// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/prefix_leader.h"

#include <algorithm>
#include <span>

namespace tokenspeed::scheduler_fsm {
namespace {

/// Leading keys that two prompts have in common. A key names its whole prefix, so the first difference is found by
/// halving.
std::size_t num_common_keys(std::span<const kv_flat::Digest> a, std::span<const kv_flat::Digest> b) {
    std::size_t begin = 0;
    std::size_t end = std::min(a.size(), b.size());
    while (begin < end) {
        const std::size_t middle = begin + (end - begin) / 2;
        if (a[middle] == b[middle]) {
            begin = middle + 1;
        } else {
            end = middle;
        }
    }
    return begin;
}

}  // namespace

bool PrefixLeaders::is_awaited(const Request& request) const {
    if (request.shared_tokens == 0) return false;
    const Request* leader = engine_.requests.find(request.leader);
    return leader != nullptr && leader->is_prefilling() && leader->num_computed_tokens < request.shared_tokens;
}

bool PrefixLeaders::can_share(const Request& request) const {
    if (!engine_.config.kv.prefix_caching || !request.may_read_cache || request.was_retracted()) return false;
    // Where states are kept is decided chunk by chunk: the end of a shared prefix need not have one.
    return engine_.kv.state_block_tokens() == 0 && request.chain.key_tokens() > 0;
}

bool PrefixLeaders::follow(Request& request, std::uint32_t num_cached_tokens) {
    request.shared_tokens = 0;
    if (!can_share(request)) return false;
    const std::uint32_t key_tokens = request.chain.key_tokens();
    const std::size_t next = num_cached_tokens / key_tokens;
    // The last known token is always computed, so the block that it completes is never shared.
    const auto keys = request.chain.keys().first(
        std::min(request.chain.keys().size(), static_cast<std::size_t>((request.num_known_tokens() - 1) / key_tokens)));
    for (const Request* other : engine_.prefilling.items()) {
        if (request.order < other->order) break;
        if (other->num_computed_tokens >= (next + 1) * key_tokens)
            continue;  // it has, and that block is no longer there
        const std::size_t common = num_common_keys(keys, other->chain.keys());
        if (common <= next) continue;
        request.leader = other->handle;
        request.shared_tokens = static_cast<std::uint32_t>(common) * key_tokens;
        return true;
    }
    return false;
}

}  // namespace tokenspeed::scheduler_fsm
