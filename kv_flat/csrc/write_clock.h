// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "kv_flat/csrc/prefix_index.h"

namespace tokenspeed::kv_flat {

/// Remembers which step writes each logical block. A copy runs before anything of its own step, so it may read only
/// what an earlier step wrote; so does whoever starts from a state. Costs nothing when a block is one logical block and
/// no group keeps states.
class WriteClock {
  public:
    WriteClock(std::uint32_t num_blocks, std::uint32_t most_units, bool has_states)
        : unit_shift_(static_cast<std::uint32_t>(std::bit_width(most_units - 1))),
          written_(most_units > 1 || has_states ? std::size_t{num_blocks} << unit_shift_ : 0) {}

    void begin_step() noexcept { ++now_; }

    void note_written(BlockId block, std::uint32_t unit) noexcept {
        if (!written_.empty()) written_[place(block, unit)] = now_;
    }

    /// Whether logical block `unit` of `block` was written before the step being planned.
    [[nodiscard]] bool is_settled(BlockId block, std::uint32_t unit) const noexcept {
        return written_[place(block, unit)] != now_;
    }

    /// Leading logical blocks of `block`, at most `num_units`, that end before the step being planned.
    [[nodiscard]] std::uint32_t num_settled(BlockId block, std::uint32_t num_units) const noexcept {
        while (num_units > 0 && !is_settled(block, num_units - 1)) --num_units;
        return num_units;
    }

  private:
    [[nodiscard]] std::size_t place(BlockId block, std::uint32_t unit) const noexcept {
        return (std::size_t{block} << unit_shift_) | unit;
    }

    std::uint32_t now_ = 1;
    std::uint32_t unit_shift_;
    std::vector<std::uint32_t> written_;
};

}  // namespace tokenspeed::kv_flat
