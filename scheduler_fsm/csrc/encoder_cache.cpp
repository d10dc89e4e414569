// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/encoder_cache.h"

#include <stdexcept>

namespace tokenspeed::scheduler_fsm {

std::optional<std::uint32_t> EncoderCache::known_embeds(std::string_view identifier) const {
    const auto found = by_identifier_.find(std::string(identifier));
    if (found == by_identifier_.end()) return std::nullopt;
    return entries_[found->second].num_embeds;
}

EncoderName EncoderCache::name(std::string identifier, std::uint32_t num_embeds) {
    const auto found = by_identifier_.find(identifier);
    if (found != by_identifier_.end()) {
        ++entries_[found->second].num_names;
        return {*this, found->second};
    }
    if (unused_.empty()) {
        unused_.push_back(static_cast<std::uint32_t>(entries_.size()));
        entries_.emplace_back();
        unused_.reserve(entries_.capacity());
    }
    const std::uint32_t index = unused_.back();
    unused_.pop_back();
    by_identifier_.emplace(identifier, index);
    Entry& entry = entries_[index];
    entry = {};
    entry.identifier = std::move(identifier);
    entry.num_embeds = num_embeds;
    entry.num_names = 1;
    entry.place = busy_.insert(busy_.end(), index);
    return {*this, index};
}

EncoderRef EncoderCache::add_ref(std::uint32_t index) noexcept {
    ++entries_[index].num_refs;
    return {*this, index, epoch_};
}

EncoderRef EncoderCache::hold(const EncoderName& name) {
    Entry& entry = entries_[name.index()];
    if (entry.num_refs == 0) {
        busy_.splice(busy_.end(), idle_, entry.place);
        num_idle_embeds_ -= entry.num_embeds;
    }
    ++counters_.num_shared;
    return add_ref(name.index());
}

EncoderRef EncoderCache::allocate(const EncoderName& name) {
    Entry& entry = entries_[name.index()];
    while (num_free_embeds_ < entry.num_embeds) evict_oldest();
    num_free_embeds_ -= entry.num_embeds;
    entry.is_cached = true;
    ++counters_.num_runs;
    counters_.num_run_embeds += entry.num_embeds;
    return add_ref(name.index());
}

void EncoderCache::let_go(std::uint32_t index, std::uint64_t epoch) noexcept {
    if (epoch != epoch_) return;  // the cache was reset meanwhile
    Entry& entry = entries_[index];
    if (--entry.num_refs > 0) return;
    idle_.splice(idle_.end(), busy_, entry.place);
    num_idle_embeds_ += entry.num_embeds;
}

void EncoderCache::evict_oldest() {
    const std::uint32_t index = idle_.front();
    Entry& entry = entries_[index];
    busy_.splice(busy_.end(), idle_, entry.place);
    entry.is_cached = false;
    num_idle_embeds_ -= entry.num_embeds;
    num_free_embeds_ += entry.num_embeds;
    ++counters_.num_evictions;
    evicted_.push_back(entry.identifier);
    forget_if_unknown(index);
}

void EncoderCache::drop_name(std::uint32_t index) noexcept {
    --entries_[index].num_names;
    forget_if_unknown(index);
}

void EncoderCache::forget_if_unknown(std::uint32_t index) noexcept {
    const Entry& entry = entries_[index];
    if (entry.num_names > 0 || entry.is_cached) return;
    by_identifier_.erase(entry.identifier);
    busy_.erase(entry.place);
    unused_.push_back(index);
}

std::vector<std::string> EncoderCache::take_evicted() {
    // One that was evicted early in a plan may have been allocated again later in it: the worker keeps that one.
    std::erase_if(evicted_, [this](const std::string& identifier) {
        const auto found = by_identifier_.find(identifier);
        return found != by_identifier_.end() && entries_[found->second].is_cached;
    });
    return std::exchange(evicted_, {});
}

void EncoderCache::reset() noexcept {
    ++epoch_;
    busy_.splice(busy_.end(), idle_);
    evicted_.clear();
    num_idle_embeds_ = 0;
    num_free_embeds_ = capacity_embeds_;
    for (std::uint32_t index = 0; index < entries_.size(); ++index) {
        Entry& entry = entries_[index];
        if (!entry.is_cached) continue;
        entry.is_cached = false;
        entry.num_refs = 0;
        forget_if_unknown(index);
    }
}

void EncoderCache::check_integrity() const {
    const auto fail = [](const std::string& what) { throw std::logic_error("encoder cache: " + what); };
    std::uint32_t num_cached_embeds = 0;
    std::uint32_t num_idle_embeds = 0;
    std::size_t num_idle = 0;
    std::size_t num_known = 0;
    for (const Entry& entry : entries_) {
        if (entry.num_refs > 0 && !entry.is_cached) fail(entry.identifier + " is held and not cached");
        num_known += entry.num_names > 0 || entry.is_cached;
        if (!entry.is_cached) continue;
        num_cached_embeds += entry.num_embeds;
        if (entry.num_refs > 0) continue;
        num_idle_embeds += entry.num_embeds;
        ++num_idle;
    }
    if (num_idle != idle_.size() || num_idle_embeds != num_idle_embeds_) fail("idle entries are counted wrong");
    if (num_cached_embeds + num_free_embeds_ != capacity_embeds_) fail("cached and free do not add up to the capacity");
    if (num_known != by_identifier_.size()) fail("an identifier is kept that nobody knows, or the other way round");
}

}  // namespace tokenspeed::scheduler_fsm
