// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "scheduler_fsm/csrc/request.h"

namespace tokenspeed::scheduler_fsm {

/// Owns every request. A handle costs one index and one comparison to resolve.
/// Requests lie side by side in chunks: a step visits all that run, and finds them in few pages of memory.
class RequestTable {
  public:
    Request& create(RequestSpec spec, OrderKey order) {
        if (free_.empty()) add_chunk();
        const std::uint32_t index = free_.back();
        Entry& entry = entry_at(index);
        entry.request.emplace(std::move(spec), RequestHandle{index, entry.generation + 1}, order);
        ++entry.generation;
        free_.pop_back();
        ++size_;
        return *entry.request;
    }

    /// The request, or null when it is gone.
    [[nodiscard]] Request* find(RequestHandle handle) const noexcept {
        if (handle.index >= chunks_.size() * kChunkEntries) return nullptr;
        Entry& entry = entry_at(handle.index);
        return entry.generation == handle.generation && entry.is_live() ? &*entry.request : nullptr;
    }

    /// Has the caches fetch what steps need of a request, without looking at it.
    void fetch(RequestHandle handle) const noexcept {
        if (handle.index >= chunks_.size() * kChunkEntries) return;
        const char* begin = reinterpret_cast<const char*>(&entry_at(handle.index));
        for (std::size_t line = 0; line < kHotLines; ++line) __builtin_prefetch(begin + line * kCacheLineBytes);
    }

    void erase(RequestHandle handle) {
        Entry& entry = entry_at(handle.index);
        entry.request.reset();
        ++entry.generation;
        free_.push_back(handle.index);
        --size_;
    }

    [[nodiscard]] std::size_t size() const noexcept { return size_; }

    template <typename Visit>
    void for_each(Visit visit) const {
        for (const auto& chunk : chunks_) {
            for (Entry& entry : *chunk) {
                if (entry.request) visit(*entry.request);
            }
        }
    }

  private:
    static constexpr std::uint32_t kChunkEntries = 64;
    static constexpr std::size_t kHotLines = (Request::kHotBytes + kCacheLineBytes - 1) / kCacheLineBytes;

    // The generation tells whether there is a request, so that nobody must ask the far end of it.
    struct alignas(kCacheLineBytes) Entry {
        std::uint32_t generation = 0;
        std::optional<Request> request;

        [[nodiscard]] bool is_live() const noexcept { return generation % 2 == 1; }
    };
    using Chunk = std::array<Entry, kChunkEntries>;

    [[nodiscard]] Entry& entry_at(std::uint32_t index) const noexcept {
        return (*chunks_[index / kChunkEntries])[index % kChunkEntries];
    }
    void add_chunk() {
        const auto begin = static_cast<std::uint32_t>(chunks_.size()) * kChunkEntries;
        chunks_.push_back(std::make_unique<Chunk>());
        // Lowest index first.
        for (std::uint32_t index = begin + kChunkEntries; index > begin; --index) free_.push_back(index - 1);
    }

    std::vector<std::unique_ptr<Chunk>> chunks_;
    std::vector<std::uint32_t> free_;
    std::size_t size_ = 0;
};

}  // namespace tokenspeed::scheduler_fsm
