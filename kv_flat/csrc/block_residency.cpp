// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/block_residency.h"

#include <algorithm>

namespace tokenspeed::kv_flat {
namespace {

double seconds(std::chrono::steady_clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

void BlockResidency::note_taken(BlockId block) {
    const Clock::time_point now = Clock::now();
    if (const auto found = followed_.find(block); found != followed_.end()) {
        ended_.push_back(life_of(found->second, now));
        followed_.erase(found);
    }
    if (std::uniform_real_distribution<double>()(dice_) < sample_rate_) followed_[block] = {now, now, {}, 0};
}

void BlockResidency::note_hit(BlockId block) {
    const auto found = followed_.find(block);
    if (found == followed_.end()) return;
    Followed& followed = found->second;
    followed.last = Clock::now();
    followed.hits[followed.num_hits++ % kMaxHits] = followed.last;
}

void BlockResidency::forget_all() {
    followed_.clear();
    ended_.clear();
}

BlockLife BlockResidency::life_of(const Followed& followed, Clock::time_point now) {
    BlockLife life{seconds(now - followed.born), seconds(now - followed.last), {}};
    const std::size_t kept = std::min(followed.num_hits, kMaxHits);
    for (std::size_t i = followed.num_hits - kept + 1; i < followed.num_hits; ++i) {
        const auto gap = followed.hits[i % kMaxHits] - followed.hits[(i - 1) % kMaxHits];
        life.reuse_gaps_s.push_back(seconds(gap));
    }
    return life;
}

}  // namespace tokenspeed::kv_flat
