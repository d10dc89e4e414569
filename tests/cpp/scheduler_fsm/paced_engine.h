// SPDX-License-Identifier: Apache-2.0
// A scheduler on a virtual clock, with a device whose times it has to learn.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "tests/cpp/scheduler_fsm/fixture.h"

namespace tokenspeed::scheduler_fsm::testing {

inline constexpr double kTargetMs = 1000.0 / 70;

inline SchedulerConfig paced(double target_tps, std::uint32_t budget = 8192) {
    SchedulerConfig config =
        config_of({.num_blocks = 60'000, .block_tokens = 64, .budget = budget, .max_num_seqs = 256});
    config.max_model_tokens = 200'000;
    config.target_tps = target_tps;
    return config;
}

/// Runs steps on a device of known speed; asynchronous scheduling plans one ahead.
class Engine {
  public:
    explicit Engine(SchedulerConfig config) : scheduler(std::move(config)) {}

    RequestHandle add(std::uint32_t num_prompt, std::uint32_t max_tokens, double target_tps = -1) {
        auto spec = spec_of("r" + std::to_string(content_), num_prompt, max_tokens, content_, 64);
        spec.target_tps = target_tps;
        ++content_;
        return std::get<RequestHandle>(scheduler.submit(std::move(spec)));
    }
    void add_many(int count, std::uint32_t num_prompt, std::uint32_t max_tokens) {
        for (int i = 0; i < count; ++i) add(num_prompt, max_tokens);
    }
    /// One step; returns its milliseconds, 0 when nothing was planned.
    double step() {
        const ExecutionPlan& plan = scheduler.plan({PauseLevel::kNone, false, now_s});
        num_refused = plan.refused.size();
        for (const Request* request : plan.refused) scheduler.release(request->handle);
        if (plan.rows.empty()) {
            now_s += 1e-3;
            return 0;
        }
        double ms = 1.3;
        num_prefill = num_decodes = 0;
        std::vector<TokenId> tokens;
        std::vector<std::uint32_t> offsets = {0};
        for (const PlanRow& row : plan.rows) {
            const bool is_decode = row.num_tokens == 1 && row.num_computed_tokens >= row.request->num_prompt_tokens;
            const double begin = row.num_computed_tokens;
            ms += is_decode ? 0.0026 + 1.7e-5 * begin
                            : row.num_tokens * (0.0035 + 3.3e-7 * (begin + row.num_tokens / 2.0));
            (is_decode ? num_decodes : num_prefill) += row.num_tokens;
            if (row.samples) tokens.push_back(7);
            offsets.push_back(static_cast<std::uint32_t>(tokens.size()));
        }
        if (num_prefill > 0) ms += num_prefill + num_decodes > largest_graph ? large_mixed_ms : mixed_ms;
        num_prompt_steps += num_prefill > 0;
        ms *= factor;
        now_s += ms / 1e3;
        std::vector<RequestHandle> gone;
        for (const Delivery& delivery : scheduler.advance({plan.step, tokens, offsets, now_s})) {
            if (delivery.finished) gone.push_back(delivery.request->handle);
        }
        for (const RequestHandle handle : gone) scheduler.release(handle);
        num_finished += static_cast<int>(gone.size());
        return ms;
    }
    void steps(int count) {
        for (int i = 0; i < count; ++i) step();
    }
    /// Runs until `count` requests have ended, at most `most_steps`; returns the largest mean of 20 steps on end.
    double largest_mean_until_finished(int count, int most_steps) {
        std::vector<double> end_s = {now_s};
        double largest_ms = 0;
        while (num_finished < count && static_cast<int>(end_s.size()) <= most_steps) {
            step();
            end_s.push_back(now_s);
            if (end_s.size() > 20) largest_ms = std::max(largest_ms, (now_s - end_s[end_s.size() - 21]) * 1e3 / 20);
        }
        return largest_ms;
    }
    /// Mean milliseconds of the next `count` steps: what a user of all of them feels.
    double mean_ms(int count) {
        double sum = 0;
        for (int i = 0; i < count; ++i) sum += step();
        return sum / count;
    }

    Scheduler scheduler;
    double now_s = 0;
    double factor = 1;
    double mixed_ms = 0;        ///< more for a step with prompts
    double large_mixed_ms = 0;  ///< more for one that is too large for every graph
    std::uint32_t largest_graph = 0;
    int num_prompt_steps = 0;
    std::uint32_t num_prefill = 0;
    std::uint32_t num_decodes = 0;
    int num_finished = 0;
    std::uint64_t num_refused = 0;  ///< by the last step

  private:
    TokenId content_ = 1;
};

/// Sixteen users that decode, with the model warm.
struct RunningEngine : Engine {
    explicit RunningEngine(double target_tps = 70) : Engine(paced(target_tps)) {
        add_many(16, 2000, 100'000);
        steps(60);
    }
};

}  // namespace tokenspeed::scheduler_fsm::testing
