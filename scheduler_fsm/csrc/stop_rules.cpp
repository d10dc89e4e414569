// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/stop_rules.h"

#include <algorithm>
#include <span>

namespace tokenspeed::scheduler_fsm {
namespace {

bool ends_in_repetition(const RepetitionRule& rule, std::span<const TokenId> output) {
    if (rule.min_count < 2) return false;
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

std::optional<Stop> check_stop(const StopRules& rules, const TokenLog& tokens, std::uint32_t num_prompt_tokens,
                               std::uint32_t max_model_tokens) {
    const TokenId last = tokens.back();
    const std::size_t num_output_tokens = tokens.size() - num_prompt_tokens;
    if (rules.eos_token == last) return Stop{FinishReason::kStop, std::nullopt};
    if (std::ranges::find(rules.stop_tokens, last) != rules.stop_tokens.end()) return Stop{FinishReason::kStop, last};
    if (num_output_tokens >= rules.max_tokens || tokens.size() >= max_model_tokens) {
        return Stop{FinishReason::kLength, std::nullopt};
    }
    if (num_output_tokens < rules.min_tokens || rules.repetition.max_pattern_tokens == 0) return std::nullopt;
    if (ends_in_repetition(rules.repetition, tokens.all().subspan(num_prompt_tokens)))
        return Stop{FinishReason::kRepetition, std::nullopt};
    return std::nullopt;
}

}  // namespace tokenspeed::scheduler_fsm
