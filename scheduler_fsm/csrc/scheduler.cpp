// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/scheduler.h"

#include <stdexcept>
#include <utility>

#include "scheduler_fsm/csrc/admission.h"
#include "scheduler_fsm/csrc/decode_pass.h"
#include "scheduler_fsm/csrc/prefill_pass.h"
#include "scheduler_fsm/csrc/result_intake.h"

namespace tokenspeed::scheduler_fsm {
namespace {

SchedulerConfig checked(SchedulerConfig config) {
    check(config);
    return config;
}

}  // namespace

Scheduler::Scheduler(SchedulerConfig config) : engine_(checked(std::move(config))) {}

OrderKey Scheduler::order_of(const RequestSpec& spec) {
    const std::uint64_t sequence = engine_.next_sequence++;
    if (engine_.config.policy == QueuePolicy::kFcfs) return {0, 0.0, sequence};
    return {spec.priority, spec.arrival_time_s, sequence};
}

std::variant<RequestHandle, Refusal> Scheduler::submit(RequestSpec spec) {
    const auto num_tokens = static_cast<std::uint32_t>(spec.prompt.tokens.size());
    if (num_tokens == 0)
        throw std::invalid_argument("request " + spec.label + " has an empty prompt; at least 1 token is needed");
    const std::uint32_t longest = engine_.config.max_model_tokens - engine_.config.num_sampled_tokens;
    if (num_tokens > longest) {
        return Refusal{"The prompt has " + std::to_string(num_tokens) + " tokens; with max_model_len " +
                       std::to_string(engine_.config.max_model_tokens) + " it may have at most " +
                       std::to_string(longest) + "."};
    }
    const std::uint32_t needed = engine_.kv.least_held_blocks(num_tokens);
    const std::uint32_t usable = engine_.kv.pool().num_usable();
    if (needed > usable) {
        return Refusal{"The prompt of " + std::to_string(num_tokens) + " tokens needs " + std::to_string(needed) +
                       " KV cache blocks; the whole cache has " + std::to_string(usable) + "."};
    }
    const OrderKey order = order_of(spec);
    Request& request = engine_.requests.create(std::move(spec), order);
    request.lane_key = engine_.prefilled_tokens + num_tokens;
    engine_.enqueue(request);
    return request.handle;
}

void Scheduler::open_gate(RequestHandle handle) {
    Request* request = engine_.requests.find(handle);
    if (request == nullptr || request->is_finished() || request->ready) return;
    request->ready = true;
    --engine_.num_parked;
    engine_.enqueue(*request);
}

const ExecutionPlan& Scheduler::plan(const StepOptions& options) {
    plan_.clear();
    plan_.step = ++engine_.step;
    if (options.pause == PauseLevel::kAll) return plan_;
    StepBuilder step(engine_, plan_, options);
    Admission admission(step, plan_);
    admission.displace();
    DecodePass(step).run();
    PrefillPass(step, admission).run();
    step.close();
    return plan_;
}

std::span<const Delivery> Scheduler::advance(const ExecutionEvents& events) {
    deliveries_.clear();
    ResultIntake(engine_).apply(events, deliveries_);
    return deliveries_;
}

void Scheduler::set_drafts(RequestHandle handle, std::span<const TokenId> drafts) {
    Request* request = engine_.requests.find(handle);
    if (request == nullptr || !std::holds_alternative<Decoding>(request->state)) return;
    request->drafts.assign(drafts.begin(), drafts.end());
}

bool Scheduler::finish(RequestHandle handle, FinishReason why) {
    Request* request = engine_.requests.find(handle);
    if (request == nullptr || request->is_finished()) return false;
    engine_.finish(*request, why);
    return true;
}

void Scheduler::release(RequestHandle handle) {
    const Request* request = engine_.requests.find(handle);
    if (request == nullptr) return;
    if (!request->is_finished()) {
        throw std::logic_error("request " + request->label + " is " + std::string(state_name(request->state)) +
                               "; only a finished request can be released");
    }
    engine_.requests.erase(handle);
}

void Scheduler::retract_all() {
    for (const OrderedRequests* set : {&engine_.decoding, &engine_.prefilling}) {
        while (!set->empty()) {
            Request* request = set->items().back();
            engine_.retract(*request);
            outside_retractions_.push_back(request);
        }
    }
}

bool Scheduler::reset_prefix_cache() { return engine_.kv.pool().clear_cache(); }

void Scheduler::check_integrity() const {
    const kv_flat::BlockPool& pool = engine_.kv.pool();
    std::vector<std::uint32_t> owners(pool.num_usable() + 1);
    std::uint32_t num_running = 0;
    std::uint32_t num_idle = 0;
    engine_.requests.for_each([&](const Request& request) {
        if (const kv_flat::KvSequence* sequence = request.kv()) {
            kv_flat::FlatKv::count_owners(*sequence, owners);
            ++num_running;
        } else if (!request.is_finished()) {
            ++num_idle;
        }
    });
    pool.check_integrity(owners);
    const auto fail = [](const std::string& what) { throw std::logic_error("scheduler: " + what); };
    if (num_running != engine_.num_running())
        fail("a request that holds KV is not in a running set, or the other way round");
    if (num_idle != num_waiting()) fail("a request without KV is neither waiting nor parked, or counted twice");
    if (engine_.slots.num_slots() - engine_.slots.num_free() != num_running)
        fail("slots and running requests do not match");
}

}  // namespace tokenspeed::scheduler_fsm
