// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kv_flat/csrc/block_key.h"
#include "scheduler_fsm/csrc/request_state.h"
#include "scheduler_fsm/csrc/token_log.h"

namespace tokenspeed::scheduler_fsm {

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

/// Whether generation ends with the last of `tokens`.
/// @param tokens the prompt, then the output so far, at least one
/// @param max_model_tokens the model's context length
[[nodiscard]] std::optional<Stop> check_stop(const StopRules& rules, const TokenLog& tokens,
                                             std::uint32_t num_prompt_tokens, std::uint32_t max_model_tokens);

}  // namespace tokenspeed::scheduler_fsm
