// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <random>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kv_flat/csrc/prefix_index.h"

namespace tokenspeed::kv_flat {

/// The life of one block, from when it was taken until it was taken again.
struct BlockLife {
    double lifetime_s = 0.0;
    double idle_s = 0.0;               ///< since it was last taken or hit
    std::vector<double> reuse_gaps_s;  ///< between the last hits, at most 3
};

/// Follows a random sample of blocks (vLLM's `kv_cache_metrics`).
class BlockResidency {
  public:
    /// @param sample_rate share of taken blocks that are followed, above 0 and at most 1
    explicit BlockResidency(double sample_rate) : sample_rate_(sample_rate) {}

    void note_taken(BlockId block);
    void note_hit(BlockId block);
    void forget_all();

    /// Lives that ended since the last call.
    [[nodiscard]] std::vector<BlockLife> drain() { return std::exchange(ended_, {}); }

  private:
    using Clock = std::chrono::steady_clock;
    static constexpr std::size_t kMaxHits = 4;

    struct Followed {
        Clock::time_point born;
        Clock::time_point last;
        std::array<Clock::time_point, kMaxHits> hits;  // a ring
        std::size_t num_hits = 0;
    };

    [[nodiscard]] static BlockLife life_of(const Followed& followed, Clock::time_point now);

    double sample_rate_;
    std::minstd_rand dice_;
    std::unordered_map<BlockId, Followed> followed_;
    std::vector<BlockLife> ended_;
};

}  // namespace tokenspeed::kv_flat
