// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tokenspeed::scheduler_fsm {

class EncoderCache;

/// A live request's knowledge of one identifier. Move-only; while it lives, the identifier keeps its number.
class [[nodiscard]] EncoderName {
  public:
    EncoderName(EncoderName&& other) noexcept : cache_(std::exchange(other.cache_, nullptr)), index_(other.index_) {}
    EncoderName& operator=(EncoderName&&) = delete;
    EncoderName(const EncoderName&) = delete;
    EncoderName& operator=(const EncoderName&) = delete;
    ~EncoderName();

    [[nodiscard]] std::uint32_t index() const noexcept { return index_; }

  private:
    friend class EncoderCache;
    EncoderName(EncoderCache& cache, std::uint32_t index) noexcept : cache_(&cache), index_(index) {}

    EncoderCache* cache_;
    std::uint32_t index_;
};

/// Keeps one encoder output in the worker. Move-only; empty when default-made or moved from.
class [[nodiscard]] EncoderRef {
  public:
    EncoderRef() = default;
    EncoderRef(EncoderRef&& other) noexcept
        : cache_(std::exchange(other.cache_, nullptr)), index_(other.index_), epoch_(other.epoch_) {}
    EncoderRef& operator=(EncoderRef&& other) noexcept;
    EncoderRef(const EncoderRef&) = delete;
    EncoderRef& operator=(const EncoderRef&) = delete;
    ~EncoderRef() { reset(); }

    [[nodiscard]] explicit operator bool() const noexcept { return cache_ != nullptr; }
    void reset() noexcept;

  private:
    friend class EncoderCache;
    EncoderRef(EncoderCache& cache, std::uint32_t index, std::uint64_t epoch) noexcept
        : cache_(&cache), index_(index), epoch_(epoch) {}

    EncoderCache* cache_ = nullptr;
    std::uint32_t index_ = 0;
    std::uint64_t epoch_ = 0;
};

/// Counts since start.
struct EncoderCounters {
    std::uint64_t num_runs = 0;        ///< encoder runs that were planned
    std::uint64_t num_run_embeds = 0;  ///< their embeddings
    std::uint64_t num_shared = 0;      ///< inputs that found their output in the cache
    std::uint64_t num_evictions = 0;
};

/// What the worker keeps of encoder outputs, counted in embeddings. An output stays while somebody holds it; after that
/// until its room is needed, least recently let go first.
class EncoderCache {
  public:
    explicit EncoderCache(std::uint32_t capacity_embeds) noexcept
        : capacity_embeds_(capacity_embeds), num_free_embeds_(capacity_embeds) {}
    EncoderCache(const EncoderCache&) = delete;
    EncoderCache& operator=(const EncoderCache&) = delete;
    ~EncoderCache() = default;

    [[nodiscard]] std::uint32_t capacity_embeds() const noexcept { return capacity_embeds_; }
    /// Embeddings that are free, or would be once everything that nobody holds is evicted.
    [[nodiscard]] std::uint32_t num_available_embeds() const noexcept { return num_free_embeds_ + num_idle_embeds_; }
    [[nodiscard]] std::uint32_t num_held_embeds() const noexcept { return capacity_embeds_ - num_available_embeds(); }
    [[nodiscard]] const EncoderCounters& counters() const noexcept { return counters_; }

    /// The number of embeddings under which an identifier is known to the cache or to a live request.
    [[nodiscard]] std::optional<std::uint32_t> known_embeds(std::string_view identifier) const;

    /// @pre known_embeds(identifier) is empty or equal to num_embeds
    EncoderName name(std::string identifier, std::uint32_t num_embeds);

    [[nodiscard]] bool is_cached(const EncoderName& name) const noexcept { return entries_[name.index()].is_cached; }
    [[nodiscard]] bool is_held(const EncoderName& name) const noexcept { return entries_[name.index()].num_refs > 0; }
    [[nodiscard]] std::uint32_t num_embeds(const EncoderName& name) const noexcept {
        return entries_[name.index()].num_embeds;
    }

    /// @pre is_cached(name)
    EncoderRef hold(const EncoderName& name);

    /// Makes room for an output that the worker computes in this step.
    /// @pre not is_cached(name), num_embeds(name) <= num_available_embeds()
    EncoderRef allocate(const EncoderName& name);

    /// Identifiers that were evicted since the last call and have not come back.
    [[nodiscard]] std::vector<std::string> take_evicted();

    /// Forgets all outputs; references that are out keep nothing from now on.
    void reset() noexcept;

    /// Throws std::logic_error naming the first broken invariant.
    void check_integrity() const;

  private:
    friend class EncoderName;
    friend class EncoderRef;

    struct Entry {
        std::string identifier;
        std::uint32_t num_embeds = 0;
        std::uint32_t num_names = 0;
        std::uint32_t num_refs = 0;
        bool is_cached = false;
        std::list<std::uint32_t>::iterator place;  // in idle_ or in busy_
    };

    EncoderRef add_ref(std::uint32_t index) noexcept;
    void let_go(std::uint32_t index, std::uint64_t epoch) noexcept;
    void drop_name(std::uint32_t index) noexcept;
    void evict_oldest();
    void forget_if_unknown(std::uint32_t index) noexcept;

    std::uint32_t capacity_embeds_;
    std::uint32_t num_free_embeds_;
    std::uint32_t num_idle_embeds_ = 0;
    std::uint64_t epoch_ = 0;
    std::vector<Entry> entries_;
    std::vector<std::uint32_t> unused_;
    std::unordered_map<std::string, std::uint32_t> by_identifier_;
    std::list<std::uint32_t> idle_;  // cached and not held, least recently let go first
    std::list<std::uint32_t> busy_;  // all others; entries change lists without allocation
    std::vector<std::string> evicted_;
    EncoderCounters counters_;
};

inline EncoderName::~EncoderName() {
    if (cache_ != nullptr) cache_->drop_name(index_);
}

inline void EncoderRef::reset() noexcept {
    if (EncoderCache* cache = std::exchange(cache_, nullptr)) cache->let_go(index_, epoch_);
}

inline EncoderRef& EncoderRef::operator=(EncoderRef&& other) noexcept {
    if (this != &other) {
        reset();
        cache_ = std::exchange(other.cache_, nullptr);
        index_ = other.index_;
        epoch_ = other.epoch_;
    }
    return *this;
}

}  // namespace tokenspeed::scheduler_fsm
