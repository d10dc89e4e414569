// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/scheduler_config.h"

#include <stdexcept>
#include <string>

namespace tokenspeed::scheduler_fsm {

void check(const SchedulerConfig& config) {
    const auto require = [](bool holds, const char* field, auto value, const char* allowed) {
        if (holds) return;
        throw std::invalid_argument("SchedulerConfig." + std::string(field) + " is " + std::to_string(value) +
                                    "; it must be " + allowed);
    };
    require(config.max_num_seqs >= 1, "max_num_seqs", config.max_num_seqs, "at least 1");
    require(config.max_num_active_seqs <= config.max_num_seqs, "max_num_active_seqs", config.max_num_active_seqs,
            "at most max_num_seqs");
    require(config.max_scheduled_tokens >= 1, "max_scheduled_tokens", config.max_scheduled_tokens, "at least 1");
    require(config.max_model_tokens >= 1, "max_model_tokens", config.max_model_tokens, "at least 1");
    require(config.watermark >= 0.0 && config.watermark < 1.0, "watermark", config.watermark, "in [0, 1)");
    require(config.decode_stagger_steps >= 1, "decode_stagger_steps", config.decode_stagger_steps, "at least 1");
    require(config.target_tps >= 0.0, "target_tps", config.target_tps, "at least 0");
    require(config.num_sampled_tokens <= 1, "num_sampled_tokens", config.num_sampled_tokens, "0 or 1");
}

}  // namespace tokenspeed::scheduler_fsm
