// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <set>
#include <utility>

#include "tests/cpp/scheduler_fsm/random_setting.h"

namespace tokenspeed::scheduler_fsm::testing {

/// What a subscriber to KV events believes can be hit.
class EventReplica {
  public:
    /// Replays what happened since the last call: then it must know exactly what can be hit.
    void follow(kv_flat::BlockPool& pool) {
        for (const kv_flat::KvEvent& event : pool.events().drain()) apply(event);
        require(stored_.size() == pool.num_cached(), "events tell of more or fewer blocks than can be hit");
        for (const auto& [group, bytes] : stored_) {
            require(pool.find({bytes}, group) != kv_flat::kNullBlock, "events tell of a block that cannot be hit");
        }
    }

  private:
    void apply(const kv_flat::KvEvent& event) {
        const auto name = std::pair(event.group, event.key.bytes);
        switch (event.kind) {
            case kv_flat::KvEvent::Kind::kStored:
                require(stored_.insert(name).second, "a block is stored twice");
                require(event.tokens.size() == event.block_tokens, "a stored block lacks tokens");
                break;
            case kv_flat::KvEvent::Kind::kRemoved:
                require(stored_.erase(name) == 1, "a block is removed that was not stored");
                break;
            case kv_flat::KvEvent::Kind::kCleared:
                stored_.clear();
                break;
        }
    }

    std::set<std::pair<kv_flat::GroupId, decltype(kv_flat::Digest::bytes)>> stored_;
};

}  // namespace tokenspeed::scheduler_fsm::testing
