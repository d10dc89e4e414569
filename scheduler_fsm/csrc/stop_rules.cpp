// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/stop_rules.h"

#include <algorithm>

namespace tokenspeed::scheduler_fsm {
namespace {

bool ends_in_repetition(const RepetitionRule& rule, std::span<const TokenId> output) {
    if (rule.max_pattern_tokens == 0 || rule.min_count < 2) return false;
    const std::size_t shortest = std::max<std::size_t>(rule.min_pattern_tokens, 1);
    for (std::size_t length = shortest; length <= rule.max_pattern_tokens; ++length) {
        if (length * rule.min_count > output.size()) return false;
        // `min_count` copies in a row: the tail equals itself shifted by one pattern.
        const auto tail = output.last(length * rule.min_count);
        if (std::ranges::equal(tail.subspan(length), tail.first(tail.size() - length))) return true;
    }
    return false;
}

}  // namespace

std::optional<Stop> check_stop(const StopRules& rules, std::span<const TokenId> output, std::uint32_t num_total_tokens,
                               std::uint32_t max_model_tokens) {
    const TokenId last = output.back();
    if (rules.eos_token == last) return Stop{FinishReason::kStop, std::nullopt};
    if (std::ranges::find(rules.stop_tokens, last) != rules.stop_tokens.end()) return Stop{FinishReason::kStop, last};
    if (output.size() >= rules.max_tokens || num_total_tokens >= max_model_tokens) {
        return Stop{FinishReason::kLength, std::nullopt};
    }
    if (output.size() < rules.min_tokens) return std::nullopt;
    if (ends_in_repetition(rules.repetition, output)) return Stop{FinishReason::kRepetition, std::nullopt};
    return std::nullopt;
}

}  // namespace tokenspeed::scheduler_fsm
