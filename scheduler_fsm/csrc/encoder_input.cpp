// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/encoder_input.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string_view>
#include <utility>

namespace tokenspeed::scheduler_fsm {
namespace {

std::string number(std::uint32_t value) { return std::to_string(value); }

/// What is wrong with one input by itself.
std::optional<std::string> flaw(const EncoderInputSpec& spec, std::uint32_t num_prompt_tokens,
                                const EncoderLimits& limits) {
    if (spec.place.begin >= spec.place.end || spec.place.end > num_prompt_tokens) {
        return "takes positions " + number(spec.place.begin) + " to " + number(spec.place.end) + " of a prompt of " +
               number(num_prompt_tokens) + " tokens";
    }
    std::uint32_t position = spec.place.begin;
    for (const TokenRange& range : spec.embeds) {
        if (range.begin < position || range.end <= range.begin || range.end > spec.place.end)
            return "has embeddings outside of its place, or twice at one position";
        position = range.end;
    }
    const std::uint32_t num_embeds = spec.num_embeds();
    if (num_embeds > limits.step_embeds) {
        return "has " + number(num_embeds) + " embeddings; the encoder budget of a step is " +
               number(limits.step_embeds);
    }
    if (num_embeds > limits.cache_embeds)
        return "has " + number(num_embeds) + " embeddings; the encoder cache holds " + number(limits.cache_embeds);
    return std::nullopt;
}

/// What is wrong with inputs that overlap, together: a chunk at their common positions needs all of them at once.
std::optional<std::string> flaw(const std::vector<const EncoderInputSpec*>& overlapping, const EncoderLimits& limits) {
    std::map<std::string_view, std::uint32_t> embeds;
    std::vector<TokenRange> ranges;
    std::uint32_t end = 0;
    for (const EncoderInputSpec* spec : overlapping) {
        embeds[spec->identifier] = spec->num_embeds();
        ranges.insert(ranges.end(), spec->embeds.begin(), spec->embeds.end());
        end = std::max(end, spec->place.end);
    }
    const std::uint32_t length = end - overlapping.front()->place.begin;
    if (!limits.split_inputs && length > limits.step_tokens)
        return "takes " + number(length) + " tokens and must not be split; a step has " + number(limits.step_tokens);
    std::uint32_t sum = 0;
    for (const auto& [identifier, num_embeds] : embeds) sum += num_embeds;
    if (sum > limits.cache_embeds) {
        return "has, with those that overlap it, " + number(sum) + " embeddings; the encoder cache holds " +
               number(limits.cache_embeds);
    }
    std::ranges::sort(ranges, {}, &TokenRange::begin);
    const auto meet = [](const TokenRange& a, const TokenRange& b) { return b.begin < a.end; };
    // Embeddings at different positions can be computed in different steps.
    const bool at_once = !limits.split_inputs || std::ranges::adjacent_find(ranges, meet) != ranges.end();
    if (at_once && sum > limits.step_embeds) {
        return "has, with those that overlap it, " + number(sum) + " embeddings; the encoder budget of a step is " +
               number(limits.step_embeds);
    }
    return std::nullopt;
}

}  // namespace

std::uint32_t EncoderInput::next_embed(std::uint32_t begin) const noexcept {
    const auto range = std::ranges::upper_bound(embeds, begin, {}, &TokenRange::end);
    return range == embeds.end() ? kNoPosition : std::max(range->begin, begin);
}

std::optional<std::string> EncoderInputs::refusal(const std::vector<EncoderInputSpec>& specs,
                                                  std::uint32_t num_prompt_tokens, const EncoderLimits& limits,
                                                  const EncoderCache& cache) {
    const auto said = [](const EncoderInputSpec& spec, const std::string& what) {
        return "The multimodal input at position " + number(spec.place.begin) + " " + what + ".";
    };
    std::map<std::string_view, std::uint32_t> known;
    std::vector<const EncoderInputSpec*> sorted;
    for (const EncoderInputSpec& spec : specs) {
        if (auto what = flaw(spec, num_prompt_tokens, limits)) return said(spec, *what);
        const auto first = known.emplace(spec.identifier, spec.num_embeds()).first;
        const std::uint32_t other = cache.known_embeds(spec.identifier).value_or(first->second);
        if (other != spec.num_embeds() || first->second != spec.num_embeds()) {
            return said(spec, "has " + number(spec.num_embeds()) + " embeddings; its identifier '" + spec.identifier +
                                  "' is in use for another one with " +
                                  number(other != spec.num_embeds() ? other : first->second));
        }
        sorted.push_back(&spec);
    }
    std::ranges::stable_sort(sorted, {}, [](const EncoderInputSpec* spec) { return spec->place.begin; });
    for (auto begin = sorted.begin(); begin != sorted.end();) {
        std::uint32_t reach = (*begin)->place.end;
        auto end = begin + 1;
        for (; end != sorted.end() && (*end)->place.begin < reach; ++end) reach = std::max(reach, (*end)->place.end);
        if (auto what = flaw({begin, end}, limits)) return said(**begin, *what);
        begin = end;
    }
    return std::nullopt;
}

EncoderInputs::EncoderInputs(std::vector<EncoderInputSpec> specs, EncoderCache& cache) {
    std::vector<std::uint32_t> order(specs.size());
    std::iota(order.begin(), order.end(), 0U);
    std::ranges::stable_sort(order, {}, [&specs](std::uint32_t index) { return specs[index].place.begin; });
    items_.reserve(specs.size());
    for (const std::uint32_t index : order) {
        EncoderInputSpec& spec = specs[index];
        const std::uint32_t num_embeds = spec.num_embeds();
        EncoderName name = cache.name(std::move(spec.identifier), num_embeds);
        items_.push_back({index, spec.place, spec.place, std::move(spec.embeds), std::move(name), {}});
    }
    join_overlapping();
}

void EncoderInputs::join_overlapping() noexcept {
    for (auto begin = items_.begin(); begin != items_.end();) {
        TokenRange whole = begin->place;
        auto end = begin + 1;
        for (; end != items_.end() && end->place.begin < whole.end; ++end)
            whole.end = std::max(whole.end, end->place.end);
        for (; begin != end; ++begin) begin->whole = whole;
    }
}

std::size_t EncoderInputs::first_after(std::uint32_t position) const noexcept {
    const auto first = std::ranges::upper_bound(items_, position, {}, [](const auto& item) { return item.whole.end; });
    return static_cast<std::size_t>(first - items_.begin());
}

std::span<const EncoderInput> EncoderInputs::take_consumed(std::uint32_t num_computed_tokens) noexcept {
    const std::size_t begin = num_consumed_;
    num_consumed_ = std::max(begin, first_after(num_computed_tokens));
    return std::span(items_).subspan(begin, num_consumed_ - begin);
}

bool EncoderInputs::let_go(std::uint32_t num_computed_tokens) noexcept {
    bool holds = false;
    for (EncoderInput& item : items_) {
        if (item.place.end <= num_computed_tokens) item.ref.reset();
        holds = holds || item.ref;
    }
    return !holds;
}

}  // namespace tokenspeed::scheduler_fsm
