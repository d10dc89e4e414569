// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tokenspeed::fuzz {

/// Which edges of the instrumented code one execution took, and about how often.
///
/// The compiler (-fsanitize-coverage=trace-pc) calls in from every basic block; an edge is a pair of blocks, hashed
/// into a table. A feature is an edge with the magnitude of its count (1, 2, 3, 4 to 7, 8 to 15, ...).
class EdgeMap {
  public:
    static constexpr std::size_t kNumSlots = std::size_t{1} << 16U;

    /// Starts a new execution.
    static void reset() noexcept;

    /// Features of the execution since reset().
    [[nodiscard]] static std::vector<std::uint32_t> features();

    /// Edge of a feature.
    [[nodiscard]] static std::uint32_t edge_of(std::uint32_t feature) noexcept { return feature / kNumMagnitudes; }

    static constexpr std::uint32_t kNumMagnitudes = 8;
};

}  // namespace tokenspeed::fuzz
