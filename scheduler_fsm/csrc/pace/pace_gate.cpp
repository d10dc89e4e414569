// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/pace/pace_gate.h"

#include <algorithm>
#include <ranges>

namespace tokenspeed::scheduler_fsm {
namespace {

// What a user lost beyond this many tokens' time is lost: catching up with it would hold prompts back for too long.
constexpr double kMostLagPeriods = 4;

void add_decode(StepWork& work, double num_tokens, double context) noexcept {
    work.decode_tokens += num_tokens;
    work.context_tokens += context;
}

/// KV tokens that one of the step's users reads.
double context_of_one(const StepWork& work) noexcept {
    return work.decode_tokens > 0 ? work.context_tokens / work.decode_tokens : 0;
}

}  // namespace

StepWork PaceGate::running_work() const noexcept {
    StepWork work;
    for (const OrderedRequests* set : {&step_.engine.decoding, &step_.engine.prefilling}) {
        for (const Request* request : set->items()) add_decode(work, 1, request->num_known_tokens());
    }
    return work;
}

double PaceGate::binding_period_s(std::span<Request* const> requests, double context_tokens) const noexcept {
    const double least_s = step_.engine.pace.least_period_s(context_tokens);
    double period_s = kNoPeriod;
    for (const Request* request : requests) {
        if (request->period_s > 0 && request->period_s >= least_s) period_s = std::min(period_s, request->period_s);
    }
    return period_s;
}

void PaceGate::shed() {
    if (!is_on()) return;
    EngineState& engine = step_.engine;
    if (engine.pace.overload() == Overload::kDegrade) return;
    const auto decoding = engine.decoding.items();
    StepWork work;
    for (const Request* request : decoding) add_decode(work, 1, request->num_known_tokens());
    if (!engine.pace.must_shed(work, binding_period_s(decoding, context_of_one(work))) || decoding.size() < 2) return;
    const auto from_behind = decoding | std::views::reverse;
    const auto without_rate = std::ranges::find_if(from_behind, [](const Request* r) { return r->period_s == 0; });
    ++engine.pace.report.num_shed_requests;
    step_.retract(without_rate != from_behind.end() ? **without_rate : *decoding.back());
}

double PaceGate::slowest_user_s(double least_period_s) {
    PaceControl& pace = step_.engine.pace;
    const double begin_s = pace.begin_s(step_.options.now_s);
    double least_s = kNoPeriod;
    for (const PlanRow& row : plan_.rows) {
        Request& request = *row.request;
        if (request.first_token_s < 0) continue;  // its first token is still under way
        const double period_s = request.period_s;
        if (period_s == 0 || period_s < least_period_s) continue;
        // The first token came at first_token_s; the one of this step has this many before it.
        const double num_before = request.num_output_tokens() + row.num_placeholders;
        double left_s = request.first_token_s + num_before * period_s - begin_s;
        const double most_lag_s = kMostLagPeriods * period_s;
        if (left_s < -most_lag_s) {
            request.first_token_s += -most_lag_s - left_s;
            left_s = -most_lag_s;
        }
        least_s = std::min(least_s, left_s);
    }
    return least_s;
}

const Request* PaceGate::next_prompt() const noexcept {
    const EngineState& engine = step_.engine;
    if (!engine.prefilling.empty()) return engine.prefilling.items().front();
    if (!engine.waiting.empty() && engine.has_slot()) return &engine.waiting.front();
    return nullptr;
}

std::size_t PaceGate::num_startable(double period_s) const noexcept {
    const EngineState& engine = step_.engine;
    const std::size_t most = std::min<std::size_t>(engine.waiting.size(), engine.slots.num_free() + engine.num_idle());
    if (most == 0 || engine.pace.overload() == Overload::kDegrade) return most;
    const StepWork running = running_work();
    std::size_t start = 0;
    std::size_t too_many = most + 1;
    while (too_many - start > 1) {
        const std::size_t middle = start + (too_many - start) / 2;
        StepWork more = running;
        add_decode(more, static_cast<double>(middle), static_cast<double>(middle) * context_of_one(running));
        (engine.pace.admits(more, period_s) ? start : too_many) = middle;
    }
    return start;
}

void PaceGate::limit_prefill() {
    num_decode_rows_ = plan_.rows.size();
    if (!is_on() || plan_.rows.empty()) return;
    for (const PlanRow& row : plan_.rows) add_decode(decodes_, row.num_tokens, row.num_computed_tokens);
    const Request* prompt = next_prompt();
    PaceControl& pace = step_.engine.pace;
    // A prompt that may not be split waits for a step that holds it whole, or it would never run.
    if (prompt == nullptr || !step_.engine.config.chunked_prefill) return;
    const double period_s = binding_period_s(step_.engine.decoding.items(), context_of_one(decodes_));
    if (period_s == kNoPeriod) return;
    ChunkQuestion question;
    question.decodes = decodes_;
    // A waiting prompt is mostly one that comes back with its history cached.
    question.begin_tokens = prompt->is_prefilling() ? prompt->num_computed_tokens : prompt->num_known_tokens();
    question.most_tokens = step_.token_budget;
    question.period_ms = period_s * 1e3;
    question.slowest_user_ms = std::min(slowest_user_s(period_s), 1e3) * 1e3;
    question.since_prompts_ms = pace.since_prompts_ms(pace.begin_s(step_.options.now_s));
    for (const Request* started : step_.engine.prefilling.items()) {
        question.started_tokens += started->num_known_tokens() - started->num_computed_tokens;
    }
    const std::size_t startable = num_startable(period_s);
    question.waiting_tokens = static_cast<double>(startable) * pace.tokens_per_prompt();
    question.newcomers = static_cast<double>(step_.engine.prefilling.size() + startable);
    // Who is refused does not wait for room.
    const bool may_wait = pace.overload() != Overload::kRefuse;
    question.held_requests = may_wait ? static_cast<double>(step_.engine.waiting.size() - startable) : 0;
    const std::uint32_t room = step_.token_budget;
    step_.token_budget = pace.prefill_tokens(question, true);
    // An encoder input that may not be split needs its room at once, too.
    const std::uint32_t kept = step_.engine.kept_tokens;
    if (kept > 1) step_.token_budget = std::max(step_.token_budget, std::min(kept, room));
}

bool PaceGate::admits(const Request& request) {
    EngineState& engine = step_.engine;
    if (!is_on() || engine.num_running() == 0) return true;
    PaceControl& pace = engine.pace;
    StepWork work = running_work();
    add_decode(work, 1, request.num_known_tokens());
    const double context_tokens = context_of_one(work);
    Request* const own[] = {const_cast<Request*>(&request)};
    double period_s = binding_period_s(own, context_tokens);
    for (const OrderedRequests* set : {&engine.decoding, &engine.prefilling}) {
        period_s = std::min(period_s, binding_period_s(set->items(), context_tokens));
    }
    if (pace.admits(work, period_s)) return true;
    if (pace.overload() == Overload::kDegrade) {
        ++pace.report.num_degraded_admissions;
        return true;
    }
    ++pace.report.num_held_admissions;
    return false;
}

bool PaceGate::refuses(const Request& request) {
    PaceControl& pace = step_.engine.pace;
    // One that ran before has been promised its answer.
    if (pace.overload() != Overload::kRefuse || request.incarnation > 0) return false;
    if (!pace.has_seen_steps()) return false;
    ++pace.report.num_refused_requests;
    return true;
}

void PaceGate::close() {
    if (!is_on() || plan_.rows.empty()) return;
    StepWork work = decodes_;
    for (std::size_t i = num_decode_rows_; i < plan_.rows.size(); ++i) {
        work = work.with_prefill(plan_.rows[i].num_computed_tokens, plan_.rows[i].num_tokens);
    }
    step_.engine.pace.note_planned(plan_.step, step_.options.now_s, work, plan_.rows.size() - num_decode_rows_);
}

}  // namespace tokenspeed::scheduler_fsm
