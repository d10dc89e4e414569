// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <unordered_set>
#include <vector>

#include "tests/cpp/fuzz/input.h"

namespace tokenspeed::fuzz {

/// Inputs worth keeping: each reached a feature that none before it did.
class Corpus {
  public:
    /// True, and the input is kept, when one of its features is new.
    bool offer(const Input& input, const std::vector<std::uint32_t>& features);

    /// A folder holds one file per input. Sorted by name, so that a run can be repeated.
    [[nodiscard]] static std::vector<Input> read(const std::filesystem::path& folder);

    /// Replaces the files of a folder by the fewest and shortest inputs that still reach every edge: greedy cover.
    void write_minimised(const std::filesystem::path& folder) const;

    [[nodiscard]] const std::vector<Input>& inputs() const noexcept { return inputs_; }
    [[nodiscard]] std::size_t num_edges() const noexcept { return edges_.size(); }
    [[nodiscard]] std::size_t num_features() const noexcept { return features_.size(); }

  private:
    [[nodiscard]] std::vector<std::size_t> cover() const;

    std::vector<Input> inputs_;
    std::vector<std::vector<std::uint32_t>> edges_of_;  // by input
    std::unordered_set<std::uint32_t> features_;
    std::unordered_set<std::uint32_t> edges_;
};

/// Writes an input into a folder under a name that follows from its bytes; returns the path.
std::filesystem::path write_input(const std::filesystem::path& folder, const Input& input);

}  // namespace tokenspeed::fuzz
