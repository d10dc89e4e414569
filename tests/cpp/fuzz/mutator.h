// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <random>

#include "tests/cpp/fuzz/input.h"

namespace tokenspeed::fuzz {

/// Makes new inputs out of old ones. The same seed makes the same inputs.
class Mutator {
  public:
    explicit Mutator(std::uint32_t seed) : engine_(seed) {}

    [[nodiscard]] std::size_t below(std::size_t end) { return engine_() % end; }
    [[nodiscard]] Input random_input();
    /// `parent`, changed a few times; `other` lends parts.
    [[nodiscard]] Input mutate(const Input& parent, const Input& other);

  private:
    [[nodiscard]] std::uint8_t random_byte() { return static_cast<std::uint8_t>(engine_()); }
    void change_once(Input& input, const Input& other);

    std::mt19937 engine_;
};

}  // namespace tokenspeed::fuzz
