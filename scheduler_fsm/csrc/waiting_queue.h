// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <set>

#include "scheduler_fsm/csrc/request.h"

namespace tokenspeed::scheduler_fsm {

/// Requests that may be admitted, in total order and, beside it, by virtual deadline for the short lane.
class WaitingQueue {
  public:
    void push(Request& request) {
        by_order_.insert(&request);
        by_lane_.insert(&request);
    }
    /// False when it is not in the queue.
    bool erase(Request& request) {
        if (by_order_.erase(&request) == 0) return false;
        by_lane_.erase(&request);
        return true;
    }

    [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(by_order_.size()); }
    [[nodiscard]] bool empty() const noexcept { return by_order_.empty(); }
    [[nodiscard]] Request& front() const noexcept { return **by_order_.begin(); }

  private:
    struct OrderLess {
        bool operator()(const Request* a, const Request* b) const noexcept { return a->order < b->order; }
    };
    struct LaneLess {
        bool operator()(const Request* a, const Request* b) const noexcept {
            if (a->order.priority != b->order.priority) return a->order.priority < b->order.priority;
            if (a->lane_key != b->lane_key) return a->lane_key < b->lane_key;
            return a->order.sequence < b->order.sequence;
        }
    };

  public:
    [[nodiscard]] const std::set<Request*, OrderLess>& by_order() const noexcept { return by_order_; }
    [[nodiscard]] const std::set<Request*, LaneLess>& by_lane() const noexcept { return by_lane_; }

  private:
    std::set<Request*, OrderLess> by_order_;
    std::set<Request*, LaneLess> by_lane_;
};

}  // namespace tokenspeed::scheduler_fsm
