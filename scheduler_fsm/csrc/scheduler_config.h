// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "kv_flat/csrc/flat_kv.h"
#include "scheduler_fsm/csrc/encoder_input.h"
#include "scheduler_fsm/csrc/pace/pace_control.h"

namespace tokenspeed::scheduler_fsm {

enum class QueuePolicy : std::uint8_t {
    kFcfs,      ///< by arrival
    kPriority,  ///< by priority (smaller first), then arrival
};

/// vLLM's scheduler settings, as far as the core decides by them. Names follow vLLM's, units added.
struct SchedulerConfig {
    kv_flat::KvConfig kv;
    QueuePolicy policy = QueuePolicy::kFcfs;
    std::uint32_t max_num_seqs = 0;
    std::uint32_t max_num_active_seqs = 0;     ///< 0: as many as max_num_seqs
    std::uint32_t max_scheduled_tokens = 0;    ///< per step
    std::uint32_t max_model_tokens = 0;        ///< context length, prompt and output
    std::uint32_t long_prefill_tokens = 0;     ///< 0: off; most tokens of one prefill per step while others wait
    bool long_prefill_adaptive = false;        ///< never below an equal share of the budget
    std::uint32_t prefill_interval_steps = 1;  ///< while something decodes, a step with prefill at most so often
    bool chunked_prefill = true;
    bool reserve_full_sequence = true;  ///< admit only what fits whole
    double watermark = 0.0;             ///< share of the pool kept free by admissions while something runs
    bool async_scheduling = false;      ///< steps are planned before the previous one's tokens are known
    std::uint32_t decode_stagger_steps =
        1;  ///< steps between two decodes of one request (pipeline parallel, asynchronous)
    std::uint32_t num_sampled_tokens = 1;  ///< per sampling step; 0 for pooling models
    std::uint32_t num_draft_tokens = 0;    ///< most draft tokens per request
    std::vector<std::uint32_t>
        draft_tokens_by_batch;  ///< dynamic K: draft tokens by number of rows in the step; empty: always the most
    std::uint32_t lookahead_tokens = 0;      ///< KV slots that a drafter writes past the step's tokens
    std::uint32_t drafter_slots = 0;         ///< input rows that a drafter adds per request
    bool drop_last_match_block = false;      ///< drafters of the EAGLE kind recompute the last block of a match
    std::uint32_t max_adapters = 0;          ///< 0: any number of LoRA adapters at once
    EncoderLimits encoder;                   ///< all 0: no multimodal input
    double target_tps = 0.0;                 ///< output tokens per second that every user shall get; 0: off
    Overload overload = Overload::kQueue;    ///< what becomes of requests that the rate has no room for
    std::vector<std::uint32_t> graph_sizes;  ///< tokens of a step that CUDA graphs are captured for, ascending
};

/// Throws std::invalid_argument naming the field, its value and what is allowed.
void check(const SchedulerConfig& config);

}  // namespace tokenspeed::scheduler_fsm
