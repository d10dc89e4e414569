// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kv_flat/csrc/block_key.h"
#include "scheduler_fsm/csrc/request_state.h"

namespace tokenspeed::scheduler_fsm {

using kv_flat::TokenId;

/// vLLM's `repetition_detection`: stop when the output ends in `min_count` copies of a pattern of these lengths.
struct RepetitionRule {
    std::uint32_t min_pattern_tokens = 0;
    std::uint32_t max_pattern_tokens = 0;  ///< 0: off
    std::uint32_t min_count = 0;
};

/// When generation ends, token by token. Stop strings are the front end's business: it sees text.
struct StopRules {
    std::optional<TokenId> eos_token;  ///< none when the request ignores it
    std::vector<TokenId> stop_tokens;
    std::uint32_t min_tokens = 0;  ///< output tokens; workers mask end tokens until then
    std::uint32_t max_tokens = 0;  ///< output tokens
    RepetitionRule repetition;
};

struct Stop {
    FinishReason reason = FinishReason::kStop;
    std::optional<TokenId> token;  ///< the stop token, when one of `stop_tokens` ended it
};

/// Whether generation ends with the last of `output`.
/// @param output the request's output ids so far, at least one
/// @param num_total_tokens prompt and output together
/// @param max_model_tokens the model's context length
[[nodiscard]] std::optional<Stop> check_stop(const StopRules& rules, std::span<const TokenId> output,
                                             std::uint32_t num_total_tokens, std::uint32_t max_model_tokens);

}  // namespace tokenspeed::scheduler_fsm
