// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/pace/pace_control.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace tokenspeed::scheduler_fsm {
namespace {

// Aimed at is a little more than what was asked for: users are judged by the target itself.
constexpr double kAim = 0.96;
// A user that is behind is caught up with in steps of at least this share of the period...
constexpr double kShortestStep = 0.7;
// ... and one that is ahead does not make the others wait for longer than a period.
constexpr double kLongestStep = 1.0;
// Decodes that admissions may add up to: the rest of the period is for prompts. Filling it up would gain little, since
// a step's cost grows with its users, and would leave prompts nothing.
constexpr double kAdmittedShare = 0.95;
// Where prompts are gathered while users wait for room, few steps hold any.
constexpr double kAdmittedShareOfGathered = 0.98;
constexpr double kShedShare = 1.05;
// A target is out of reach when no step of late was shorter than this share of its period.
constexpr double kReachedShare = 1.25;
constexpr double kForgetLeast = 1.001;
constexpr std::uint32_t kShedPlans = 8;
// Prompts that got nothing in so many plans get a small chunk, whatever it costs: nothing starves.
constexpr std::uint32_t kHungryPlans = 8;
// While others wait for room: those whose prompts are gathered lose less by that than those behind them gain.
constexpr std::uint32_t kGatheringPlans = 32;
constexpr double kHungryShare = 0.25;
constexpr std::uint32_t kLeastChunk = 16;
// Newcomers wait for each other for at most so many periods...
constexpr double kMostGatherPeriods = 1.0;
// ... and for no longer than this share of what all users together lose to a step with prompts.
constexpr double kGatherShare = 0.25;
// What prompts cost in any case is not worth it below this share of a period.
constexpr double kNoticedShare = 0.05;
constexpr double kRowMemory = 1.0 / 16;
// Where what prompts cost in any case takes longer than a period, they get it once all users are ahead by as much.
constexpr double kMostAheadPeriods = 4;
// What users leave prompts of the largest CUDA graph, where a step that is too large for it takes longer by this share
// of a period. With less room, prompts that came together would need several steps, and each costs more for holding
// some.
constexpr double kGraphRoomShare = 0.25;
constexpr double kCostlyShare = 0.5;

/// Whether a step costs noticeably more for holding prompts, however few tokens they have.
bool is_noticed(const StepTimeModel& model, const StepWork& decodes, double period_ms) {
    return model.least_prompt_ms(decodes) >= kNoticedShare * period_ms;
}

/// Whether newcomers should wait for others that share their step's fixed cost.
bool should_gather(const ChunkQuestion& question, const StepTimeModel& model, std::uint32_t room) {
    if (question.started_tokens > 0 || question.waiting_tokens >= room) return false;
    const double least_ms = model.least_prompt_ms(question.decodes);
    if (!is_noticed(model, question.decodes, question.period_ms)) return false;
    const double lost_ms = question.decodes.decode_tokens * least_ms;
    return question.since_prompts_ms < std::min(kMostGatherPeriods * question.period_ms, kGatherShare * lost_ms);
}

/// Whether steps that fit a CUDA graph, `room` tokens each, take prompts in for less than one that is too large.
bool should_stay_captured(const ChunkQuestion& question, const StepTimeModel& model, std::uint32_t room) {
    const double num_steps = std::ceil((question.started_tokens + question.waiting_tokens) / room);
    return (num_steps - 1) * model.least_prompt_ms(question.decodes) < model.large_step_ms();
}

/// Whether newcomers can be gathered while others wait behind them for room.
bool is_crowded(const ChunkQuestion& question, const StepTimeModel& model) {
    return question.newcomers > 0 && question.held_requests > 0 &&
           is_noticed(model, question.decodes, question.period_ms);
}

/// The chunk while others wait whom the rate has no room for: what steps lose to prompts is then what it lacks room
/// for.
///
/// As much as fits a graph, at once, when users are ahead by what that takes: pieces would each cost a step as much in
/// any case. Until then nothing, unless newcomers together have waited for longer than all users together lose to such
/// a step.
std::uint32_t gathered_chunk(const ChunkQuestion& question, const StepTimeModel& model) {
    const std::uint32_t captured = model.captured_prefill(question.decodes);
    const std::uint32_t room =
        captured >= kLeastChunk ? std::min(captured, question.most_tokens) : question.most_tokens;
    const double spare_ms = std::min(question.slowest_user_ms, kMostAheadPeriods * question.period_ms);
    const std::uint32_t fits = model.fitting_prefill(question.decodes, question.begin_tokens, spare_ms, room);
    const double lost_ms = question.decodes.decode_tokens * model.least_prompt_ms(question.decodes);
    const bool is_whole = fits == room && question.started_tokens + question.waiting_tokens >= room;
    return is_whole || question.newcomers * question.since_prompts_ms >= lost_ms ? fits : 0;
}

}  // namespace

std::uint32_t chunk_within_target(const ChunkQuestion& question, const StepTimeModel& model) {
    if (is_crowded(question, model)) return gathered_chunk(question, model);
    const double budget_ms =
        std::clamp(question.slowest_user_ms, kShortestStep * question.period_ms, kLongestStep * question.period_ms);
    const auto fitting = [&](double ms) {
        return model.fitting_prefill(question.decodes, question.begin_tokens, ms, question.most_tokens);
    };
    std::uint32_t fits = fitting(budget_ms);
    if (fits == 0) fits = fitting(std::min(question.slowest_user_ms, kMostAheadPeriods * question.period_ms));
    const std::uint32_t captured = model.captured_prefill(question.decodes);
    const bool may_be_captured = captured >= kLeastChunk && captured < fits;
    if (should_gather(question, model, may_be_captured ? captured : fits)) return 0;
    return may_be_captured && should_stay_captured(question, model, captured) ? captured : fits;
}

PaceControl::PaceControl(double target_tps, Overload overload, GraphSizes graphs)
    : period_s_(target_tps > 0 ? kAim / target_tps : 0),
      is_on_(target_tps > 0),
      overload_(overload),
      model_(std::move(graphs)) {}

double PaceControl::period_for(double target_tps) noexcept {
    if (target_tps < 0) return period_s_;
    is_on_ = is_on_ || target_tps > 0;
    return target_tps > 0 ? kAim / target_tps : 0;
}

double PaceControl::begin_s(double now_s) const noexcept {
    if (in_flight_.empty()) return now_s;
    double free_s = std::max(in_flight_.front().begin_s, was_idle_ ? 0.0 : last_completed_s_);
    for (const InFlight& step : in_flight_) free_s += step.predicted_ms / 1e3;
    return std::max(now_s, free_s);
}

void PaceControl::note_planned(std::uint64_t step, double now_s, const StepWork& work, std::size_t num_prompt_rows) {
    // With more to do, time between two completions counts: that is what users feel.
    const double begin = was_idle_ || last_completed_s_ > now_s ? now_s : last_completed_s_;
    was_idle_ = false;
    in_flight_.push_back({step, now_s, begin, model_.predict_ms(work), work});
    if (num_prompt_rows == 0) return;
    prompts_end_s_ = begin_s(now_s);  // the step itself is in flight now, so this is when it ends
    const double tokens = work.prefill_tokens / static_cast<double>(num_prompt_rows);
    tokens_per_prompt_row_ += kRowMemory * (tokens - tokens_per_prompt_row_);
}

void PaceControl::note_completed(std::uint64_t step, double now_s, bool has_more) {
    const auto found = std::ranges::find(in_flight_, step, &InFlight::step);
    if (found == in_flight_.end()) return;
    const double begin = std::max(found->begin_s, last_completed_s_);
    StepWork work = found->work;
    work.launched_tokens = 0;
    for (const InFlight& other : in_flight_) {
        if (other.step != step && other.planned_s >= last_completed_s_) {
            work.launched_tokens = std::max(work.launched_tokens, other.work.launched_tokens);
        }
    }
    report.predicted_ms = model_.predict_ms(work);
    report.measured_ms = (now_s - begin) * 1e3;
    tally.add(work, report.predicted_ms, report.measured_ms);
    model_.learn(work, report.measured_ms);
    least_ms_ = std::min(report.measured_ms, least_ms_ * kForgetLeast);
    in_flight_.erase(found);
    last_completed_s_ = now_s;
    was_idle_ = in_flight_.empty() && !has_more;
}

double PaceControl::least_period_s(double context_tokens) const noexcept {
    // What was reached lately counts more than what the model says of one user, which it has seldom seen.
    return std::min(least_ms_ / kReachedShare, model_.predict_ms({1, context_tokens, 0, 0})) / 1e3;
}

bool PaceControl::admits(const StepWork& decodes, double period_s) const noexcept {
    const double period_ms = period_s * 1e3;
    const double room_tokens = kGraphRoomShare * model_.captured_prefill({});
    if (model_.captured_prefill(decodes) < room_tokens && model_.large_step_ms() > kCostlyShare * period_ms)
        return false;
    const bool is_gathered = is_noticed(model_, decodes, period_ms);
    return model_.predict_ms(decodes) <= (is_gathered ? kAdmittedShareOfGathered : kAdmittedShare) * period_ms;
}

bool PaceControl::must_shed(const StepWork& decodes, double period_s) noexcept {
    const bool is_over = has_seen_steps() && model_.predict_ms(decodes) > kShedShare * period_s * 1e3;
    num_overloaded_plans_ = is_over ? num_overloaded_plans_ + 1 : 0;
    if (num_overloaded_plans_ < kShedPlans) return false;
    num_overloaded_plans_ = 0;
    return true;
}

std::uint32_t PaceControl::prefill_tokens(const ChunkQuestion& question, bool prompts_want) {
    std::uint32_t tokens = std::min(chunk_budget_(question, model_), question.most_tokens);
    num_hungry_plans_ = tokens == 0 && prompts_want ? num_hungry_plans_ + 1 : 0;
    if (num_hungry_plans_ >= (is_crowded(question, model_) ? kGatheringPlans : kHungryPlans)) {
        num_hungry_plans_ = 0;
        const StepWork least = question.decodes.with_prefill(question.begin_tokens, 1);
        const double budget_ms = model_.predict_ms(least) + kHungryShare * question.period_ms;
        tokens = model_.fitting_prefill(question.decodes, question.begin_tokens, budget_ms, question.most_tokens);
        tokens = std::min(std::max(tokens, kLeastChunk), question.most_tokens);
    }
    report.chunk_tokens = tokens;
    report.num_limited_steps += prompts_want && tokens < question.most_tokens;
    return tokens;
}

}  // namespace tokenspeed::scheduler_fsm
