// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <string>

#include "tests/cpp/fuzz/input.h"

namespace tokenspeed::fuzz {

/// Runs the events that an input spells. Empty when all went well, else what went wrong.
/// What ends the process (a sanitizer's report, an abort, more than kMaxSeconds) is written to `findings` on the way
/// out.
class Execution {
  public:
    static constexpr unsigned kMaxSeconds = 60;

    explicit Execution(std::filesystem::path findings);

    [[nodiscard]] std::string run(const Input& input);

    /// The shortest input that still fails, found by leaving parts out.
    [[nodiscard]] Input shrink(Input input);

    [[nodiscard]] const std::filesystem::path& findings() const noexcept { return findings_; }

  private:
    std::filesystem::path findings_;
};

}  // namespace tokenspeed::fuzz
