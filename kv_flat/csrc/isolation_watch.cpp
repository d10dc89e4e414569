// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/isolation_watch.h"

#include <algorithm>
#include <bit>

namespace tokenspeed::kv_flat {

std::vector<std::uint32_t> content_marks(std::span<const TokenId> tokens, std::uint32_t key_tokens) {
    std::vector<std::uint32_t> marks;
    if (key_tokens == 0) return marks;
    marks.reserve(tokens.size() / key_tokens);
    std::uint64_t state = 0x243F6A8885A308D3ULL;
    for (std::size_t end = key_tokens; end <= tokens.size(); end += key_tokens) {
        for (const TokenId token : tokens.subspan(end - key_tokens, key_tokens)) {
            state = (std::rotl(state, 23) ^ static_cast<std::uint32_t>(token)) * 0x9E3779B97F4A7C15ULL;
        }
        marks.push_back(static_cast<std::uint32_t>(state >> 32U));
    }
    return marks;
}

std::uint32_t IsolationWatch::note(std::span<const std::uint32_t> marks, const Digest& root, std::size_t first) {
    if (entries_.empty()) entries_.resize(std::bit_ceil(std::size_t{num_keys_} * 2));
    const auto owner = static_cast<std::uint32_t>(root.leading_bits()) | 1U;
    const auto entry_of = [this](std::uint32_t mark) -> Entry& { return entries_[mark & (entries_.size() - 1)]; };
    std::size_t end = std::min(first, marks.size());
    while (end < marks.size()) {
        const Entry& entry = entry_of(marks[end]);
        if (entry.owner == 0 || entry.mark != marks[end] || entry.owner == owner) break;
        ++end;
    }
    for (const std::uint32_t mark : marks) entry_of(mark) = {mark, owner};
    return static_cast<std::uint32_t>(end - std::min(first, marks.size()));
}

}  // namespace tokenspeed::kv_flat
