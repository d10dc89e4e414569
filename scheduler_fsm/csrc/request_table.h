// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "scheduler_fsm/csrc/request.h"

namespace tokenspeed::scheduler_fsm {

/// Owns every request. A handle costs one index and one comparison to resolve.
class RequestTable {
  public:
    Request& create(RequestSpec spec, OrderKey order) {
        if (free_.empty()) {
            free_.push_back(static_cast<std::uint32_t>(entries_.size()));
            entries_.emplace_back();
        }
        const std::uint32_t index = free_.back();
        Entry& entry = entries_[index];
        entry.request = std::make_unique<Request>(std::move(spec), RequestHandle{index, entry.generation}, order);
        free_.pop_back();
        ++size_;
        return *entry.request;
    }

    /// The request, or null when it is gone.
    [[nodiscard]] Request* find(RequestHandle handle) const noexcept {
        if (handle.index >= entries_.size()) return nullptr;
        const Entry& entry = entries_[handle.index];
        return entry.generation == handle.generation ? entry.request.get() : nullptr;
    }

    void erase(RequestHandle handle) {
        Entry& entry = entries_[handle.index];
        entry.request.reset();
        ++entry.generation;
        free_.push_back(handle.index);
        --size_;
    }

    [[nodiscard]] std::size_t size() const noexcept { return size_; }

    template <typename Visit>
    void for_each(Visit visit) const {
        for (const Entry& entry : entries_) {
            if (entry.request) visit(*entry.request);
        }
    }

  private:
    struct Entry {
        std::unique_ptr<Request> request;
        std::uint32_t generation = 0;
    };
    std::vector<Entry> entries_;
    std::vector<std::uint32_t> free_;
    std::size_t size_ = 0;
};

}  // namespace tokenspeed::scheduler_fsm
