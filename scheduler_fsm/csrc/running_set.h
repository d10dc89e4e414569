// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "scheduler_fsm/csrc/request.h"

namespace tokenspeed::scheduler_fsm {

/// Requests in total order.
class OrderedRequests {
  public:
    void insert(Request& request) { list_.insert(position(request), &request); }
    void erase(const Request& request) { list_.erase(position(request)); }

    [[nodiscard]] std::span<Request* const> items() const noexcept { return list_; }
    [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(list_.size()); }
    [[nodiscard]] bool empty() const noexcept { return list_.empty(); }

  private:
    [[nodiscard]] std::vector<Request*>::iterator position(const Request& request) {
        const auto before = [](const Request* item, const OrderKey& key) { return item->order < key; };
        return std::lower_bound(list_.begin(), list_.end(), request.order, before);
    }
    std::vector<Request*> list_;
};

/// How many running requests and idle sessions use each LoRA adapter; a worker holds at most `max_adapters` of them.
class AdapterUse {
  public:
    explicit AdapterUse(std::uint32_t max_adapters) noexcept : max_adapters_(max_adapters) {}

    [[nodiscard]] bool admits(std::int32_t adapter) const {
        return adapter == 0 || max_adapters_ == 0 || users_.size() < max_adapters_ || users_.contains(adapter);
    }
    [[nodiscard]] std::uint32_t num_users(std::int32_t adapter) const {
        const auto found = users_.find(adapter);
        return found == users_.end() ? 0 : found->second;
    }
    void add(std::int32_t adapter) {
        if (adapter != 0) ++users_[adapter];
    }
    void remove(std::int32_t adapter) {
        if (adapter != 0 && --users_.at(adapter) == 0) users_.erase(adapter);
    }

  private:
    std::uint32_t max_adapters_;
    std::map<std::int32_t, std::uint32_t> users_;
};

}  // namespace tokenspeed::scheduler_fsm
