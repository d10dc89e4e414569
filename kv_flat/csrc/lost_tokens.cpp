// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/lost_tokens.h"

#include <algorithm>

#include "kv_flat/csrc/flat_kv.h"

namespace tokenspeed::kv_flat {

LostTokens FlatKv::lost_tokens(std::span<const Digest> keys, std::uint32_t max_tokens,
                               std::uint32_t num_found_tokens) const noexcept {
    // One group stands for all. A group of full attention knows every block of the prefix.
    const std::vector<GroupSpec>& groups = config_.groups;
    const auto is_full = [](const GroupSpec& group) { return group.retention == Retention::kFull; };
    const auto full = std::ranges::find_if(groups, is_full);
    LostTokens lost;
    if (full == groups.end()) return lost;
    const auto group = static_cast<GroupId>(full - groups.begin());

    const std::size_t found = num_found_tokens / config_.key_tokens;
    const std::size_t num_usable = std::min<std::size_t>(keys.size(), max_tokens / config_.key_tokens);
    std::size_t index = found;
    while (index < num_usable && pool_.find(keys[index], group) != kNullBlock) ++index;

    // A prefix could have ended at the last key that the groups which keep less have as well: it was there, but not
    // used.
    const auto lesser_have = [&](std::size_t key) {
        for (GroupId other = 0; other < groups.size(); ++other)
            if (!is_full(groups[other]) && pool_.find(keys[key], other) == kNullBlock) return false;
        return true;
    };
    std::size_t usable_end = index;
    while (usable_end > found && !lesser_have(usable_end - 1)) --usable_end;
    lost.num_granularity = static_cast<std::uint32_t>(usable_end - found) * config_.key_tokens;
    lost.num_missing_state = static_cast<std::uint32_t>(index - usable_end) * config_.key_tokens;

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
