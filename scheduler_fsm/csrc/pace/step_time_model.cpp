// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/pace/step_time_model.h"

#include <algorithm>
#include <cmath>

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
constexpr std::array<double, 3> kDecodePrior = {4.0, 0.5, 2.0};
constexpr std::array<double, 2> kPromptPrior = {20.0, 10.0};

constexpr double kErrorMemory = 1.0 / 64;
constexpr double kLeastShare = 0.02;  // of a step's time that its prompts take at least

/// CUDA graphs are captured for 1, 2, 4 and multiples of 8 rows.
double padded(double rows) noexcept {
    if (rows <= 2) return rows;
    if (rows <= 4) return 4;
    return std::ceil(rows / 8) * 8;
}

std::size_t kind_of(const StepWork& work) noexcept { return work.prefill_tokens > 0 ? 1 : 0; }

std::array<double, 3> decode_features(const StepWork& work) noexcept {
    return {1.0, padded(work.decode_tokens) / kRows, work.context_tokens / kContext};
}

std::array<double, 2> prompt_features(const StepWork& work) noexcept {
    return {work.prefill_tokens / kPrefill, work.prefill_pairs / kPairs};
}

}  // namespace

void RecentMedian::add(double value) noexcept { values_[num_seen_++ % kSize] = value; }

double RecentMedian::value(double otherwise) const noexcept {
    const std::size_t size = std::min(num_seen_, kSize);
    if (size == 0) return otherwise;
    std::array<double, kSize> sorted = values_;
    const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(size / 2);
    std::nth_element(sorted.begin(), middle, sorted.begin() + static_cast<std::ptrdiff_t>(size));
    return *middle;
}

StepTimeModel::StepTimeModel() noexcept : decodes_(kDecodePrior), prompts_(kPromptPrior) {}

double StepTimeModel::fitted_ms(const StepWork& work) const noexcept {
    return std::max(decodes_.value(decode_features(work)) + prompts_.value(prompt_features(work)), 1e-3);
}

void StepTimeModel::start_from(const StepTimeProfile& profile) noexcept {
    decodes_.start_from(
        {profile.fixed_ms, profile.row_us / kUsPerMs * kRows, profile.context_us / kUsPerMs * kContext});
    prompts_.start_from({profile.prefill_us / kUsPerMs * kPrefill, profile.pair_us / kUsPerMs * kPairs});
}

StepTimeProfile StepTimeModel::profile() const noexcept {
    const auto& [fixed, rows, context] = decodes_.coefficients();
    const auto& [prefill, pairs] = prompts_.coefficients();
    const double of_decodes = correction(0);
    const double of_prompts = correction(1);
    return {.fixed_ms = fixed * of_decodes,
            .row_us = rows * of_decodes * kUsPerMs / kRows,
            .context_us = context * of_decodes * kUsPerMs / kContext,
            .prefill_us = prefill * of_prompts * kUsPerMs / kPrefill,
            .pair_us = pairs * of_prompts * kUsPerMs / kPairs};
}

double StepTimeModel::correction(std::size_t kind) const noexcept {
    return ratios_[kind].value(ratios_[1 - kind].value(1.0));
}

double StepTimeModel::predict_ms(const StepWork& work) const noexcept {
    return fitted_ms(work) * correction(kind_of(work));
}

void StepTimeModel::learn(const StepWork& work, double measured_ms) noexcept {
    if (!std::isfinite(measured_ms) || measured_ms <= 0) return;
    const double error = std::abs(predict_ms(work) - measured_ms) / measured_ms;
    relative_error_ += (num_steps_ == 0 ? 1.0 : kErrorMemory) * (std::min(error, 10.0) - relative_error_);
    ++num_steps_;
    if (work.prefill_tokens > 0) {
        const double of_decodes = decodes_.value(decode_features(work));
        prompts_.add(prompt_features(work), std::max(measured_ms - of_decodes, kLeastShare * measured_ms));
    } else {
        decodes_.add(decode_features(work), measured_ms);
    }
    ratios_[kind_of(work)].add(measured_ms / fitted_ms(work));
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
