// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace tokenspeed::scheduler_fsm {

/// Numbers of tokens that CUDA graphs were captured for. A step with fewer is padded to the next; one with more runs
/// without a graph.
class GraphSizes {
  public:
    /// @param sizes ascending; none: nothing is captured, and nothing padded.
    explicit GraphSizes(std::vector<std::uint32_t> sizes = {}) : sizes_(std::move(sizes)) {}

    [[nodiscard]] bool empty() const noexcept { return sizes_.empty(); }
    [[nodiscard]] double largest() const noexcept { return sizes_.empty() ? 0 : sizes_.back(); }
    /// Whether a step of so many tokens is too large for every graph, where there are graphs.
    [[nodiscard]] bool exceeded_by(double num_tokens) const noexcept {
        return !sizes_.empty() && num_tokens > sizes_.back();
    }
    [[nodiscard]] double padded(double num_tokens) const noexcept {
        const auto fits = [](std::uint32_t size, double wanted) { return size < wanted; };
        const auto found = std::ranges::lower_bound(sizes_, num_tokens, fits);
        return found == sizes_.end() ? num_tokens : *found;
    }

  private:
    std::vector<std::uint32_t> sizes_;
};

}  // namespace tokenspeed::scheduler_fsm
