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

    /// @param prior coefficients before the first sample, each as uncertain as it is large
    explicit LeastSquares(const Vector& prior) noexcept : prior_(prior), coefficients_(prior) {
        for (std::size_t i = 0; i < N; ++i) covariance_[i][i] = prior[i] * prior[i];
    }

    /// Takes `known` in place of the prior: measured before, so samples move it from there and do not replace it.
    void start_from(const Vector& known) noexcept {
        coefficients_ = known;
        covariance_ = {};
        for (std::size_t i = 0; i < N; ++i) {
            prior_[i] = std::max(known[i], kLeastKnown * prior_[i]);
            covariance_[i][i] = std::pow(kKnownSpread * prior_[i], 2);
        }
        num_samples_ = kFewSamples;
    }

    [[nodiscard]] const Vector& coefficients() const noexcept { return coefficients_; }

    [[nodiscard]] double value(const Vector& x) const noexcept {
        double sum = 0;
        for (std::size_t i = 0; i < N; ++i) sum += coefficients_[i] * x[i];
        return sum;
    }

    void add(const Vector& x, double measured) noexcept {
        const double fitted = std::max(value(x), kLeast);
        Vector px{};
        double spread = 0;
        for (std::size_t i = 0; i < N; ++i) {
            for (std::size_t j = 0; j < N; ++j) px[i] += covariance_[i][j] * x[j];
            spread += x[i] * px[i];
        }
        const double noise = std::pow(kRelativeNoise * fitted, 2);
        const double most = num_samples_++ < kFewSamples ? std::abs(measured - fitted) : kMostSurprise * fitted;
        const double surprise = std::clamp(measured - fitted, -most, most);
        const double scale = 1.0 / (kForgetting * noise + spread);
        for (std::size_t i = 0; i < N; ++i) {
            coefficients_[i] = std::max(0.0, coefficients_[i] + px[i] * scale * surprise);
            for (std::size_t j = 0; j < N; ++j) {
                covariance_[i][j] = (covariance_[i][j] - px[i] * px[j] * scale) / kForgetting;
            }
        }
        bound_covariance();
    }

  private:
    static constexpr double kForgetting = 0.998;
    static constexpr double kRelativeNoise = 0.05;
    static constexpr double kMostSurprise = 0.5;
    static constexpr double kMostVariance = 4.0;  // of the prior's
    static constexpr double kLeast = 0.05;
    static constexpr double kKnownSpread = 0.2;    // of a coefficient that was measured before
    static constexpr double kLeastKnown = 0.05;    // of the prior: a coefficient that was 0 can still grow
    static constexpr std::size_t kFewSamples = 4;  // the prior is a guess: the first samples replace it

    void bound_covariance() noexcept {
        for (std::size_t i = 0; i < N; ++i) {
            const double most = kMostVariance * prior_[i] * prior_[i];
            if (covariance_[i][i] <= most) continue;
            const double shrink = std::sqrt(most / covariance_[i][i]);
            for (std::size_t j = 0; j < N; ++j) {
                covariance_[i][j] *= shrink;
                covariance_[j][i] *= shrink;
            }
        }
    }

    Vector prior_;
    Vector coefficients_;
    std::array<Vector, N> covariance_{};
    std::size_t num_samples_ = 0;
};

}  // namespace tokenspeed::scheduler_fsm
