// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <span>

namespace tokenspeed::scheduler_fsm::testing {

/// Decides everything that a World leaves open: pseudo-random from a seed, or read from bytes that a fuzzer varies.
class Dice {
  public:
    explicit Dice(std::uint32_t seed) : engine_(seed) {}
    /// One byte per throw; throws past the end are 0. @pre the bytes outlive the dice
    explicit Dice(std::span<const std::uint8_t> bytes) : reads_bytes_(true), bytes_(bytes) {}

    std::uint32_t below(std::uint32_t end) {
        if (!reads_bytes_) return static_cast<std::uint32_t>(engine_() % end);
        const std::uint32_t value = bytes_.empty() ? 0 : bytes_.front();
        bytes_ = bytes_.subspan(std::min<std::size_t>(1, bytes_.size()));
        return value % end;
    }
    std::uint32_t between(std::uint32_t first, std::uint32_t last) { return first + below(last - first + 1); }
    bool one_in(std::uint32_t count) { return below(count) == 0; }

    [[nodiscard]] bool is_exhausted() const noexcept { return reads_bytes_ && bytes_.empty(); }

  private:
    std::mt19937 engine_;
    bool reads_bytes_ = false;
    std::span<const std::uint8_t> bytes_;
};

}  // namespace tokenspeed::scheduler_fsm::testing
