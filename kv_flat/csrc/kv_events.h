// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "kv_flat/csrc/block_key.h"
#include "kv_flat/csrc/digest.h"
#include "kv_flat/csrc/prefix_index.h"

namespace tokenspeed::kv_flat {

/// One change of the set of blocks that can be hit. Replaying a log from the start gives exactly that set.
struct KvEvent {
    enum class Kind : std::uint8_t { kStored, kRemoved, kCleared };

    Kind kind = Kind::kCleared;
    GroupId group = 0;
    std::uint32_t block_tokens = 0;
    Digest key;
    Digest parent;                ///< kStored: key of the block before; the chain's root for the first
    bool has_parent = false;      ///< kStored: false for the first block of a sequence
    std::vector<TokenId> tokens;  ///< kStored: the block's token ids
};

/// Collects events between two drains. Costs nothing while nobody subscribes.
class KvEventLog {
  public:
    explicit KvEventLog(bool enabled) noexcept : enabled_(enabled) {}

    [[nodiscard]] bool enabled() const noexcept { return enabled_; }
    void record(KvEvent event) {
        if (enabled_) events_.push_back(std::move(event));
    }
    [[nodiscard]] std::vector<KvEvent> drain() { return std::exchange(events_, {}); }

  private:
    bool enabled_;
    std::vector<KvEvent> events_;
};

}  // namespace tokenspeed::kv_flat
