// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "scheduler_fsm/csrc/scheduler.h"

namespace tokenspeed::scheduler_fsm::testing {

struct Shape {
    std::uint32_t num_blocks = 8;  ///< usable
    std::uint32_t block_tokens = 4;
    std::uint32_t budget = 8;
    std::uint32_t max_num_seqs = 4;
    QueuePolicy policy = QueuePolicy::kFcfs;
    bool async_scheduling = false;
    std::uint32_t num_drafts = 0;
    std::uint32_t drafter_slots = 0;
    bool prefix_caching = true;
    EncoderLimits encoder = {};
};

inline SchedulerConfig config_of(const Shape& shape) {
    SchedulerConfig config;
    config.kv.num_blocks = shape.num_blocks + 1;
    config.kv.key_tokens = shape.block_tokens;
    config.kv.in_flight_tokens = 2 * shape.budget;
    config.kv.prefix_caching = shape.prefix_caching;
    config.kv.groups = {{"full", shape.block_tokens, kv_flat::Retention::kFull, 0}};
    config.policy = shape.policy;
    config.max_num_seqs = shape.max_num_seqs;
    config.max_scheduled_tokens = shape.budget;
    config.max_model_tokens = 1000;
    config.async_scheduling = shape.async_scheduling;
    config.num_draft_tokens = shape.num_drafts;
    config.drafter_slots = shape.drafter_slots;
    config.encoder = shape.encoder;
    return config;
}

/// Prompts of different `content` share nothing.
inline RequestSpec spec_of(const std::string& label, std::uint32_t num_prompt, std::uint32_t max_tokens,
                           TokenId content, std::uint32_t key_tokens, std::int32_t priority = 0) {
    RequestSpec spec;
    spec.label = label;
    spec.prompt.tokens.resize(num_prompt);
    std::iota(spec.prompt.tokens.begin(), spec.prompt.tokens.end(), content * 10'000);
    spec.prompt.chain = kv_flat::KeyChain(key_tokens, {});
    spec.prompt.chain.extend(spec.prompt.tokens);
    spec.stop.max_tokens = max_tokens;
    spec.priority = priority;
    return spec;
}

/// A scheduler with requests known by name, and a worker that samples 7 for every row.
class Bench {
  public:
    explicit Bench(const Shape& shape) : shape_(shape), scheduler(config_of(shape)) {}

    RequestHandle add(const std::string& label, std::uint32_t num_prompt, std::uint32_t max_tokens,
                      std::int32_t priority = 0) {
        return add(spec_of(label, num_prompt, max_tokens, next_content_++, shape_.block_tokens, priority));
    }
    RequestHandle add(RequestSpec spec) {
        const std::string label = spec.label;
        auto outcome = scheduler.submit(std::move(spec));
        const auto handle = std::get<RequestHandle>(outcome);
        handles_[label] = handle;
        return handle;
    }
    /// Tokens of the step by request.
    std::map<std::string, std::uint32_t> plan() {
        std::map<std::string, std::uint32_t> rows;
        const ExecutionPlan& plan = scheduler.plan();
        for (const PlanRow& row : plan.rows) rows[row.request->label] = row.num_tokens;
        plan_ = &plan;
        step_ = plan.step;
        samples_.clear();
        for (const PlanRow& row : plan.rows) samples_.push_back(row.samples);
        return rows;
    }
    /// Results of the last plan; returns who finished.
    std::vector<std::string> advance() {
        std::vector<TokenId> tokens;
        std::vector<std::uint32_t> offsets = {0};
        for (const bool samples : samples_) {
            if (samples) tokens.push_back(7);
            offsets.push_back(static_cast<std::uint32_t>(tokens.size()));
        }
        std::vector<std::string> finished;
        std::vector<RequestHandle> gone;
        for (const Delivery& delivery : scheduler.advance({step_, tokens, offsets})) {
            if (!delivery.finished) continue;
            finished.push_back(delivery.request->label);
            gone.push_back(delivery.request->handle);
        }
        for (const RequestHandle handle : gone) scheduler.release(handle);
        scheduler.check_integrity();
        return finished;
    }
    /// The last plan, until the next call into the scheduler.
    [[nodiscard]] const ExecutionPlan& last() const { return *plan_; }
    [[nodiscard]] RequestHandle handle(const std::string& label) const { return handles_.at(label); }
    [[nodiscard]] std::string state(const std::string& label) const {
        const Request* request = scheduler.find(handle(label));
        return request == nullptr ? "gone" : std::string(state_name(request->state));
    }

  private:
    Shape shape_;
    TokenId next_content_ = 1;
    std::map<std::string, RequestHandle> handles_;
    std::uint64_t step_ = 0;
    const ExecutionPlan* plan_ = nullptr;
    std::vector<bool> samples_;

  public:
    Scheduler scheduler;
};

}  // namespace tokenspeed::scheduler_fsm::testing
