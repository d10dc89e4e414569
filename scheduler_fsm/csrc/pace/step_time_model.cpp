// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/pace/step_time_model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace tokenspeed::scheduler_fsm {
namespace {

// Units of the features, so that coefficients are milliseconds of like size.
constexpr double kRows = 64;
constexpr double kContext = 65'536;
constexpr double kPrefill = 1024;
constexpr double kPairs = 16'777'216;
constexpr double kUsPerMs = 1e3;

// Before anything was measured: a model of a few billion parameters on a data-centre GPU. The first steps, which are
// prompts with nobody decoding beside them, correct it.
constexpr std::array<double, 4> kDecodePrior = {4.0, 0.5, 2.0, 1.0};
constexpr std::array<double, 2> kPromptPrior = {20.0, 10.0};

// What prompts cost in any case is learnt from steps in which their tokens cost little: a step that is filled up to a
// target takes the same time whatever is in it.
constexpr double kFewTokens = 256;
constexpr double kFewTokensOfLarge = 1024;  // of a step that is too large for every graph

constexpr double kErrorMemory = 1.0 / 64;
constexpr double kLeastShare = 0.02;  // of a step's time that its prompts take at least

std::size_t kind_of(const StepWork& work) noexcept { return work.has_prompts() ? 1 : 0; }

}  // namespace

void RecentSteps::add(const StepWork& work, double measured_ms) noexcept {
    steps_[num_seen_++ % kSize] = {work, measured_ms};
}

StepTimeModel::StepTimeModel(GraphSizes graphs)
    : graphs_(std::move(graphs)), decodes_(kDecodePrior, kDecodePrior), prompts_(kPromptPrior, kPromptPrior) {}

std::array<double, 4> StepTimeModel::decode_features(const StepWork& work) const noexcept {
    return {1.0, graphs_.padded(work.decode_tokens) / kRows, work.context_tokens / kContext,
            graphs_.exceeded_by(work.decode_tokens) ? 1.0 : 0.0};
}

std::array<double, 2> StepTimeModel::prompt_features(const StepWork& work) const noexcept {
    return {work.prefill_tokens / kPrefill, work.prefill_pairs / kPairs};
}

double StepTimeModel::prompt_fixed_ms(const StepWork& work) const noexcept {
    double sum = 0;
    if (work.prefill_tokens > 0) sum += mixed_[graphs_.exceeded_by(work.decode_tokens + work.prefill_tokens)].ms();
    if (work.launched_tokens > 0) sum += launched_[graphs_.exceeded_by(work.launched_tokens)].ms();
    return sum;
}

double StepTimeModel::fitted_ms(const StepWork& work) const noexcept {
    return std::max(
        decodes_.value(decode_features(work)) + prompts_.value(prompt_features(work)) + prompt_fixed_ms(work), 1e-3);
}

void StepTimeModel::start_from(const StepTimeProfile& profile) noexcept {
    decodes_.start_from({profile.fixed_ms, profile.row_us / kUsPerMs * kRows, profile.context_us / kUsPerMs * kContext,
                         profile.large_ms});
    prompts_.start_from({profile.prefill_us / kUsPerMs * kPrefill, profile.pair_us / kUsPerMs * kPairs});
    const std::array<double, 2> more_ms = {profile.mixed_ms, profile.large_mixed_ms};
    for (std::size_t kind = 0; kind < more_ms.size(); ++kind) {
        mixed_[kind].start_from(more_ms[kind] / 2);
        launched_[kind].start_from(more_ms[kind] / 2);
    }
}

StepTimeProfile StepTimeModel::profile() const noexcept {
    const auto& [fixed, rows, context, large] = decodes_.coefficients();
    const auto& [prefill, pairs] = prompts_.coefficients();
    const double of_decodes = correction(0);
    const double of_prompts = correction(1);
    return {.fixed_ms = fixed * of_decodes,
            .row_us = rows * of_decodes * kUsPerMs / kRows,
            .context_us = context * of_decodes * kUsPerMs / kContext,
            .prefill_us = prefill * of_prompts * kUsPerMs / kPrefill,
            .pair_us = pairs * of_prompts * kUsPerMs / kPairs,
            .mixed_ms = mixed_ms(false) * of_prompts,
            .large_mixed_ms = mixed_ms(true) * of_prompts,
            .large_ms = large * of_decodes};
}

void StepTimeModel::correct() noexcept {
    const auto fitted = [this](const StepWork& work) { return fitted_ms(work); };
    const double none = 1.0;
    corrections_[0] = recent_[0].median_ratio(fitted, recent_[1].median_ratio(fitted, none));
    corrections_[1] = recent_[1].median_ratio(fitted, corrections_[0]);
}

double StepTimeModel::predict_ms(const StepWork& work) const noexcept {
    return fitted_ms(work) * correction(kind_of(work));
}

void StepTimeModel::learn(const StepWork& work, double measured_ms) noexcept {
    if (!std::isfinite(measured_ms) || measured_ms <= 0) return;
    const double error = std::abs(predict_ms(work) - measured_ms) / measured_ms;
    relative_error_ += (num_steps_ == 0 ? 1.0 : kErrorMemory) * (std::min(error, 10.0) - relative_error_);
    ++num_steps_;
    has_seen_large_ = has_seen_large_ || graphs_.exceeded_by(work.launched_tokens);
    if (work.has_prompts()) {
        learn_prompts(work, measured_ms - decodes_.value(decode_features(work)), fitted_ms(work));
    } else {
        decodes_.add(decode_features(work), measured_ms, fitted_ms(work));
    }
    recent_[kind_of(work)].add(work, measured_ms);
    correct();
}

void StepTimeModel::learn_prompts(const StepWork& work, double added_ms, double scale_ms) noexcept {
    if (work.prefill_tokens > 0) {
        const double sample_ms = std::max(added_ms - prompt_fixed_ms(work), kLeastShare * scale_ms);
        prompts_.add(prompt_features(work), sample_ms, scale_ms);
    }
    // What the tokens do not explain, once something is known of them.
    const double rest_ms = added_ms - prompts_.value(prompt_features(work)) - prompt_fixed_ms(work);
    const bool is_large = graphs_.exceeded_by(work.decode_tokens + work.prefill_tokens);
    const bool has_few = work.prefill_tokens <= (is_large ? kFewTokensOfLarge : kFewTokens);
    if (work.launched_tokens > 0 && has_few) {
        FixedCost& cost = launched_[graphs_.exceeded_by(work.launched_tokens)];
        cost.add(cost.ms() + rest_ms, scale_ms);
    } else if (has_few) {
        mixed_[is_large].add(mixed_[is_large].ms() + rest_ms, scale_ms);
    }
}

void FixedCost::start_from(double known_ms) noexcept {
    ms_ = known_ms;
    weight_ = kLeastWeight;
}

void FixedCost::add(double sample_ms, double most_ms) noexcept {
    const double surprise = std::clamp(sample_ms - ms_, -most_ms, most_ms);
    ms_ = std::max(0.0, ms_ + weight_ * surprise);
    weight_ = std::max(kLeastWeight, weight_ / (1 + weight_));
}

double StepTimeModel::least_prompt_ms(const StepWork& decodes) const noexcept {
    return mixed_ms(graphs_.exceeded_by(decodes.decode_tokens + 1)) * correction(1);
}

double StepTimeModel::large_step_ms() const noexcept {
    return has_seen_large_ ? std::max(0.0, mixed_ms(true) - mixed_ms(false)) * correction(1) : 0.0;
}

std::uint32_t StepTimeModel::captured_prefill(const StepWork& decodes) const noexcept {
    if (graphs_.empty()) return std::numeric_limits<std::uint32_t>::max();
    return static_cast<std::uint32_t>(std::max(0.0, graphs_.largest() - decodes.decode_tokens));
}

std::uint32_t StepTimeModel::fitting_prefill(const StepWork& work, double begin, double budget_ms,
                                             std::uint32_t most) const noexcept {
    std::uint32_t fits = 0;
    std::uint32_t too_many = most + 1;
    while (too_many - fits > 1) {
        const std::uint32_t middle = fits + (too_many - fits) / 2;
        (predict_ms(work.with_prefill(begin, middle)) <= budget_ms ? fits : too_many) = middle;
    }
    return fits;
}

}  // namespace tokenspeed::scheduler_fsm
