// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

namespace tokenspeed::scheduler_fsm {

/// A sum of non-negative coefficients times features, fitted by recursive least squares with forgetting.
///
/// Relative errors count. After the first few, one sample moves the fit by at most half of what was fitted, so that
/// an outlier does little.
/// The variance of a coefficient that its features do not excite is bounded: it does not run away.
template <std::size_t N>
class LeastSquares {
  public:
    using Vector = std::array<double, N>;

    /// @param prior coefficients before the first sample
    /// @param spread how uncertain each of them is
    LeastSquares(const Vector& prior, const Vector& spread) noexcept : spread_(spread), coefficients_(prior) {
        for (std::size_t i = 0; i < N; ++i) covariance_[i][i] = spread[i] * spread[i];
    }

    /// Takes `known` in place of the prior: measured before, so samples move it from there and do not replace it.
    void start_from(const Vector& known) noexcept {
        coefficients_ = known;
        covariance_ = {};
        for (std::size_t i = 0; i < N; ++i) {
            spread_[i] = std::max(known[i], kLeastKnown * spread_[i]);
            covariance_[i][i] = std::pow(kKnownSpread * spread_[i], 2);
        }
        num_samples_ = kFewSamples;
    }

    [[nodiscard]] const Vector& coefficients() const noexcept { return coefficients_; }

    [[nodiscard]] double value(const Vector& x) const noexcept {
        double sum = 0;
        for (std::size_t i = 0; i < N; ++i) sum += coefficients_[i] * x[i];
        return sum;
    }

    /// @param scale what errors are relative to: the fitted value of the whole that `measured` is a part of
    void add(const Vector& x, double measured, double scale) noexcept {
        const double fitted = value(x);
        Vector px{};
        double spread = 0;
        for (std::size_t i = 0; i < N; ++i) {
            for (std::size_t j = 0; j < N; ++j) px[i] += covariance_[i][j] * x[j];
            spread += x[i] * px[i];
        }
        const double noise = std::pow(kRelativeNoise * std::max(scale, kLeast), 2);
        const double most = num_samples_++ < kFewSamples ? std::abs(measured - fitted) : kMostSurprise * scale;
        const double surprise = std::clamp(measured - fitted, -most, most);
        const double gain = 1.0 / (kForgetting * noise + spread);
        for (std::size_t i = 0; i < N; ++i) {
            coefficients_[i] += px[i] * gain * surprise;
            for (std::size_t j = 0; j < N; ++j) {
                covariance_[i][j] = (covariance_[i][j] - px[i] * px[j] * gain) / kForgetting;
            }
        }
        bound_covariance();
        cut_negatives(x);
    }

  private:
    static constexpr double kForgetting = 0.998;
    static constexpr double kRelativeNoise = 0.05;
    static constexpr double kMostSurprise = 0.5;
    static constexpr double kMostVariance = 4.0;  // of the first one
    static constexpr double kLeast = 0.05;
    static constexpr double kKnownSpread = 0.2;    // of a coefficient that was measured before
    static constexpr double kLeastKnown = 0.05;    // of the spread: a coefficient that was 0 can still grow
    static constexpr std::size_t kFewSamples = 4;  // the prior is a guess: the first samples replace it

    /// No coefficient is negative. To cut them off alone would add what they took away, and samples below the fit would
    /// raise it for ever: so the others give it back, in proportion, and the sample says what it said.
    void cut_negatives(const Vector& x) noexcept {
        const double said = value(x);
        for (double& coefficient : coefficients_) coefficient = std::max(0.0, coefficient);
        const double cut = value(x);
        if (said <= 0 || cut <= said) return;
        for (double& coefficient : coefficients_) coefficient *= said / cut;
    }

    void bound_covariance() noexcept {
        for (std::size_t i = 0; i < N; ++i) {
            const double most = kMostVariance * spread_[i] * spread_[i];
            if (covariance_[i][i] <= most) continue;
            const double shrink = std::sqrt(most / covariance_[i][i]);
            for (std::size_t j = 0; j < N; ++j) {
                covariance_[i][j] *= shrink;
                covariance_[j][i] *= shrink;
            }
        }
    }

    Vector spread_;
    Vector coefficients_;
    std::array<Vector, N> covariance_{};
    std::size_t num_samples_ = 0;
};

}  // namespace tokenspeed::scheduler_fsm
