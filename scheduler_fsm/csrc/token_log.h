// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kv_flat/csrc/block_key.h"

namespace tokenspeed::scheduler_fsm {

using kv_flat::TokenId;

/// The ids of one sequence, which grow token by token.
///
/// A thousand sequences end on a thousand pages of memory, and to reach a page that the processor has lost sight of
/// costs as much as the rest of a row. So new ids collect here, among what a step reads anyway, and move to the end of
/// the sequence a cache line at a time. Whoever asks for the row as a whole has them moved at once.
class TokenLog {
  public:
    TokenLog() = default;
    explicit TokenLog(std::vector<TokenId> tokens) noexcept : stored_(std::move(tokens)) {}

    [[nodiscard]] std::size_t size() const noexcept { return stored_.size() + num_recent_; }

    /// @pre size() > 0
    [[nodiscard]] TokenId back() const noexcept { return num_recent_ > 0 ? recent_[num_recent_ - 1] : stored_.back(); }

    void push_back(TokenId token) {
        recent_[num_recent_++] = token;
        if (size() % kRecent == 0) settle();
    }
    /// @pre size() > 0
    void pop_back() {
        settle();
        stored_.pop_back();
    }
    void append(std::span<const TokenId> tokens) {
        settle();
        stored_.insert(stored_.end(), tokens.begin(), tokens.end());
    }

    /// All ids in one row. Valid until the log changes.
    [[nodiscard]] std::span<const TokenId> all() const {
        settle();
        return stored_;
    }

    /// Where the next cache line of ids goes.
    [[nodiscard]] const TokenId* end_of_row() const noexcept { return stored_.data() + stored_.size(); }
    /// Whether the next id makes a cache line of ids go there.
    [[nodiscard]] bool is_about_to_settle() const noexcept { return (size() + 1) % kRecent == 0; }

  private:
    static constexpr std::size_t kRecent = 16;  // ids in a cache line

    void settle() const {
        if (num_recent_ == 0) return;
        stored_.insert(stored_.end(), recent_.begin(), recent_.begin() + num_recent_);
        num_recent_ = 0;
    }

    // What the log says does not change when its parts move.
    mutable std::vector<TokenId> stored_;
    mutable std::uint32_t num_recent_ = 0;
    std::array<TokenId, kRecent> recent_{};
};

}  // namespace tokenspeed::scheduler_fsm
