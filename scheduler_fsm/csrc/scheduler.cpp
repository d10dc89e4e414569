// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/scheduler.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "scheduler_fsm/csrc/admission.h"
#include "scheduler_fsm/csrc/decode_pass.h"
#include "scheduler_fsm/csrc/pace/pace_gate.h"
#include "scheduler_fsm/csrc/prefill_pass.h"
#include "scheduler_fsm/csrc/result_intake.h"

namespace tokenspeed::scheduler_fsm {
namespace {

SchedulerConfig checked(SchedulerConfig config) {
    check(config);
    config.encoder.step_tokens =
        config.max_scheduled_tokens - std::min(config.max_scheduled_tokens, config.drafter_slots);
    return config;
}

}  // namespace

Scheduler::Scheduler(SchedulerConfig config) : engine_(checked(std::move(config))) {}

OrderKey Scheduler::next_order(std::int64_t priority, double arrival_time_s, std::optional<double> rank) {
    const std::uint64_t sequence = engine_.next_sequence++;
    if (engine_.config.policy == QueuePolicy::kFcfs) return {0, rank.value_or(0.0), sequence};
    return {priority, rank.value_or(arrival_time_s), sequence};
}

std::optional<Refusal> Scheduler::refusal_of(std::uint32_t num_tokens) const {
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
    return std::nullopt;
}

std::variant<RequestHandle, Refusal> Scheduler::submit(RequestSpec spec) {
    const auto num_tokens = static_cast<std::uint32_t>(spec.prompt.tokens.size());
    if (num_tokens == 0)
        throw std::invalid_argument("request " + spec.label + " has an empty prompt; at least 1 token is needed");
    if (auto refusal = refusal_of(num_tokens)) return *std::move(refusal);
    if (!spec.prompt.encoder_inputs.empty()) {
        auto why = EncoderInputs::refusal(spec.prompt.encoder_inputs, num_tokens, engine_.config.encoder,
                                          engine_.encoder_cache);
        if (why) return Refusal{std::move(*why)};
    }
    std::vector<EncoderInputSpec> inputs = std::move(spec.prompt.encoder_inputs);
    const OrderKey order = next_order(spec.priority, spec.arrival_time_s, spec.rank);
    const double period_s = engine_.pace.period_for(spec.target_tps);
    Request& request = engine_.requests.create(std::move(spec), order);
    request.period_s = period_s;
    if (!inputs.empty()) request.encoder = std::make_unique<EncoderInputs>(std::move(inputs), engine_.encoder_cache);
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

std::optional<Refusal> Scheduler::feed(RequestHandle handle, TurnInput input) {
    Request* request = engine_.requests.find(handle);
    if (request == nullptr || !request->awaits_input)
        throw std::invalid_argument("input for a request that is gone, or that does not wait for any");
    if (input.tokens.empty())
        throw std::invalid_argument("session " + request->label + " got empty input; at least 1 token is needed");
    const std::size_t num_tokens = request->tokens.size() - 1 + input.tokens.size();
    if (auto refusal = refusal_of(static_cast<std::uint32_t>(num_tokens))) return refusal;
    const OrderKey order = next_order(request->order.priority, input.arrival_time_s, input.rank);
    engine_.start_turn(*request, std::move(input), order);
    return std::nullopt;
}

const ExecutionPlan& Scheduler::plan(const StepOptions& options) {
    plan_.clear();
    plan_.step = ++engine_.step;
    engine_.kv.begin_step();
    if (options.pause == PauseLevel::kAll) return plan_;
    if (!engine_.transfers.undecided.empty()) Transfers(engine_).take_undecided_back();
    StepBuilder step(engine_, plan_, options);
    PaceGate pace(step, plan_);
    Admission admission(step, plan_, pace);
    PrefillPass prefill(step, admission);
    pace.shed();
    if (!prefill.is_throttled()) admission.displace();
    DecodePass(step).run();
    pace.limit_prefill();
    prefill.run();
    step.close();
    pace.close();
    return plan_;
}

std::span<const Delivery> Scheduler::advance(const ExecutionEvents& events) {
    deliveries_.clear();
    last_record_ = ResultIntake(engine_).apply(events, deliveries_);
    if (engine_.pace.is_on()) note_pace(events);
    return deliveries_;
}

void Scheduler::note_pace(const ExecutionEvents& events) {
    for (const Delivery& delivery : deliveries_) {
        Request& request = *delivery.request;
        if (request.first_token_s < 0 && delivery.num_new_tokens > 0) request.first_token_s = events.now_s;
    }
    engine_.pace.note_completed(events.step, events.now_s, engine_.num_running() > 0 || !engine_.waiting.empty());
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
    if (!std::holds_alternative<Finished>(request->state)) {
        throw std::logic_error("request " + request->label + " is " + std::string(state_name(request->state)) +
                               "; only a finished request can be released");
    }
    engine_.requests.erase(handle);
}

void Scheduler::retract_all() {
    for (const OrderedRequests* set : {&engine_.decoding, &engine_.prefilling, &engine_.transfers.loaded}) {
        while (!set->empty()) {
            Request* request = set->items().back();
            engine_.retract(*request);
            outside_retractions_.push_back(request);
        }
    }
    while (!engine_.idle.empty()) {
        outside_retractions_.push_back(engine_.idle.back());
        engine_.retract(*engine_.idle.back());
    }
}

void Scheduler::let_go(RequestHandle handle, bool awaits_send) {
    Request* request = engine_.requests.find(handle);
    if (request == nullptr) return;
    if (!request->is_finished()) {
        throw std::logic_error("request " + request->label + " is " + std::string(state_name(request->state)) +
                               "; only an ended request can be let go");
    }
    Transfers(engine_).set_verdict(*request, awaits_send);
}

bool Scheduler::load_done(RequestHandle handle) {
    Request* request = engine_.requests.find(handle);
    if (request != nullptr) return Transfers(engine_).load_done(*request);
    ++engine_.transfers.num_unknown_reports;
    return false;
}

bool Scheduler::send_done(RequestHandle handle) {
    Request* request = engine_.requests.find(handle);
    if (request != nullptr) return Transfers(engine_).send_done(*request);
    ++engine_.transfers.num_unknown_reports;
    return false;
}

void Scheduler::fail_load(RequestHandle handle) {
    if (Request* request = engine_.requests.find(handle)) Transfers(engine_).fail_load(*request);
}

const Request* Scheduler::retire(RequestHandle handle) {
    Request* request = engine_.requests.find(handle);
    if (request != nullptr && request->kv() != nullptr)
        engine_.kv.retire(*request->kv(), request->num_confirmed_tokens(), request->num_computed_tokens);
    return request;
}

std::vector<Request*> Scheduler::invalidate(std::span<const kv_flat::BlockId> blocks) {
    return Transfers(engine_).invalidate(blocks);
}

void Scheduler::recompute(RequestHandle handle) {
    Request* request = engine_.requests.find(handle);
    if (request == nullptr || !(request->is_running() || request->is_loaded())) return;
    engine_.retract(*request);
    request->load.barred = true;
}

bool Scheduler::reset_prefix_cache() {
    kv_flat::BlockPool& pool = engine_.kv.pool();
    engine_.isolation.clear();
    // A copy in flight reads no key: what it holds is no reason to keep the cache.
    if (engine_.num_running() > 0 || engine_.copy_pins.empty()) return pool.clear_cache();
    pool.forget_keys();
    return true;
}

void Scheduler::check_integrity() const {
    const kv_flat::BlockPool& pool = engine_.kv.pool();
    std::vector<std::uint32_t> owners(pool.num_usable() + 1);
    std::uint32_t num_running = 0;
    std::uint32_t num_draining = 0;
    std::uint32_t num_others = 0;
    std::uint32_t num_awaiting_input = 0;
    engine_.requests.for_each([&](const Request& request) {
        if (const kv_flat::KvSequence* sequence = request.kv()) kv_flat::FlatKv::count_owners(*sequence, owners);
        if (request.is_running()) {
            ++num_running;
        } else if (request.is_draining()) {
            ++num_draining;
        } else if (!request.is_finished()) {
            ++num_others;
        }
        num_awaiting_input += request.awaits_input && !request.is_finished();
    });
    for (const FencedSequence& fenced : engine_.transfers.fenced) kv_flat::FlatKv::count_owners(fenced.kv, owners);
    engine_.transfers.pins.count_owners(owners);
    for (const CopyPin& pin : engine_.copy_pins) ++owners[pin.block.id()];
    pool.check_integrity(owners);
    engine_.encoder_cache.check_integrity();
    const auto fail = [](const std::string& what) { throw std::logic_error("scheduler: " + what); };
    if (num_running != engine_.num_running()) fail("a running request is not in a running set, or the other way round");
    if (num_others != num_waiting()) fail("a request that does not run is in no queue, or counted twice");
    if (num_draining != engine_.transfers.num_draining) fail("requests that drain are miscounted");
    if (num_awaiting_input != engine_.num_awaiting_input) fail("sessions that await input are counted wrong");
    if (engine_.slots.num_slots() - engine_.slots.num_free() != num_running + engine_.num_idle())
        fail("slots and requests that hold one do not match");
}

}  // namespace tokenspeed::scheduler_fsm
