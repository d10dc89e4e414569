// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

namespace tokenspeed::scheduler_fsm {

class SlotPool;

/// One request's place in the workers' persistent batch. Move-only; its end frees the place.
class [[nodiscard]] RequestSlot {
  public:
    RequestSlot(RequestSlot&& other) noexcept : pool_(std::exchange(other.pool_, nullptr)), index_(other.index_) {}
    RequestSlot& operator=(RequestSlot&& other) noexcept;
    RequestSlot(const RequestSlot&) = delete;
    RequestSlot& operator=(const RequestSlot&) = delete;
    ~RequestSlot();

    [[nodiscard]] std::uint32_t index() const noexcept { return index_; }

  private:
    friend class SlotPool;
    RequestSlot(SlotPool& pool, std::uint32_t index) noexcept : pool_(&pool), index_(index) {}

    SlotPool* pool_;
    std::uint32_t index_;
};

/// The places of the persistent batch (vLLM's `max_num_seqs`).
class SlotPool {
  public:
    explicit SlotPool(std::uint32_t num_slots) : num_slots_(num_slots) {
        for (std::uint32_t index = num_slots; index > 0; --index) free_.push_back(index - 1);
    }
    SlotPool(const SlotPool&) = delete;
    SlotPool& operator=(const SlotPool&) = delete;
    ~SlotPool() {
        if (free_.size() == num_slots_) return;
        std::fputs("SlotPool destroyed while slots are held\n", stderr);
        std::abort();
    }

    [[nodiscard]] std::uint32_t num_slots() const noexcept { return num_slots_; }
    [[nodiscard]] std::uint32_t num_free() const noexcept { return static_cast<std::uint32_t>(free_.size()); }

    /// @pre num_free() > 0
    RequestSlot take() {
        const std::uint32_t index = free_.back();
        free_.pop_back();
        return {*this, index};
    }

  private:
    friend class RequestSlot;
    void release(std::uint32_t index) noexcept {
        free_.push_back(index);
    }  // capacity was reached once: never allocates

    std::uint32_t num_slots_;
    std::vector<std::uint32_t> free_;
};

inline RequestSlot& RequestSlot::operator=(RequestSlot&& other) noexcept {
    if (this != &other) {
        if (pool_ != nullptr) pool_->release(index_);
        pool_ = std::exchange(other.pool_, nullptr);
        index_ = other.index_;
    }
    return *this;
}

inline RequestSlot::~RequestSlot() {
    if (pool_ != nullptr) pool_->release(index_);
}

}  // namespace tokenspeed::scheduler_fsm
