// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/lost_tokens.h"

#include <algorithm>

#include "kv_flat/csrc/flat_kv.h"

namespace tokenspeed::kv_flat {

LostTokens FlatKv::lost_tokens(std::span<const Digest> keys, std::uint32_t max_tokens,
                               const Match& match) const noexcept {
    // One group stands for all. A group of full attention knows every block of the prefix.
    const auto is_full = [](const GroupSpec& group) { return group.retention == Retention::kFull; };
    const auto full = std::ranges::find_if(config_.groups, is_full);
    LostTokens lost;
    if (full == config_.groups.end()) return lost;
    const auto group = static_cast<GroupId>(full - config_.groups.begin());

    std::size_t index = match.num_tokens / config_.key_tokens;
    const std::size_t num_usable = std::min<std::size_t>(keys.size(), max_tokens / config_.key_tokens);
    std::uint32_t num_there = 0;
    for (; index < num_usable && pool_.find(keys[index], group) != kNullBlock; ++index) ++num_there;
    const bool has_others = !std::ranges::all_of(config_.groups, is_full);
    (has_others ? lost.num_missing_state : lost.num_granularity) = num_there * config_.key_tokens;

    // What lies behind an evicted block is of no use, whether it is still there or not.
    std::uint32_t num_evicted = 0;
    for (; index < num_usable; ++index) {
        if (pool_.find(keys[index], group) == kNullBlock && !pool_.was_evicted(keys[index], group)) break;
        ++num_evicted;
    }
    lost.num_evicted = num_evicted * config_.key_tokens;
    return lost;
}

}  // namespace tokenspeed::kv_flat
