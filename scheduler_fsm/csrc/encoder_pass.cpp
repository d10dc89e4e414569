// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/encoder_pass.h"

#include <algorithm>
#include <vector>

namespace tokenspeed::scheduler_fsm {
namespace {

/// What a chunk would take of the cache and of the step's budget. Each input counts once.
class Tally {
  public:
    Tally(const EncoderCache& cache, std::uint32_t budget_embeds) noexcept
        : cache_(cache), budget_(budget_embeds), room_(cache.num_available_embeds()) {}

    /// False, and no change, when there is no room for the input.
    [[nodiscard]] bool take(const EncoderInput& input) {
        if (cache_.is_held(input.name) || is_counted(input.name.index())) return true;
        const std::uint32_t num_embeds = cache_.num_embeds(input.name);
        const bool must_run = !cache_.is_cached(input.name);
        if (num_embeds > room_ || (must_run && num_embeds > budget_)) return false;
        room_ -= num_embeds;
        if (must_run) budget_ -= num_embeds;
        counted_.insert(std::ranges::lower_bound(counted_, input.name.index()), input.name.index());
        return true;
    }

  private:
    [[nodiscard]] bool is_counted(std::uint32_t index) const noexcept {
        return std::ranges::binary_search(counted_, index);
    }

    const EncoderCache& cache_;
    std::uint32_t budget_;
    std::uint32_t room_;
    std::vector<std::uint32_t> counted_;  // sorted
};

}  // namespace

EncoderPass::EncoderPass(EngineState& engine, ExecutionPlan& plan)
    : engine_(engine), plan_(plan), budget_embeds_(engine.config.encoder.step_embeds) {
    std::erase_if(engine_.encoder_holders, [this](Request* request) {
        note_consumed(*request);
        return request->encoder->let_go(request->num_computed_tokens);
    });
}

void EncoderPass::note_consumed(Request& request) {
    for (const EncoderInput& item : request.encoder->take_consumed(request.num_computed_tokens))
        plan_.consumed_inputs.push_back({&request, item.number});
}

std::uint32_t EncoderPass::fit(const Request& request, TokenRange chunk, std::uint32_t budget_embeds) const {
    const auto& items = request.encoder->items();
    Tally tally(engine_.encoder_cache, budget_embeds);
    auto [begin, end] = chunk;
    for (std::size_t i = request.encoder->first_after(begin); i < items.size() && items[i].place.begin < end; ++i) {
        const std::uint32_t first_read = items[i].next_embed(begin);
        // A shorter chunk may still read a later input that overlaps this one, so go on.
        if (first_read < end && !tally.take(items[i])) end = first_read;
    }
    return end;
}

std::uint32_t EncoderPass::fitting_tokens(const Request& request, std::uint32_t begin, std::uint32_t num_tokens) const {
    const std::uint32_t end = fit(request, {begin, begin + num_tokens}, budget_embeds_);
    if (engine_.config.encoder.split_inputs) return end - begin;
    const auto& items = request.encoder->items();
    for (std::size_t i = request.encoder->first_after(begin); i < items.size() && items[i].whole.begin < end; ++i) {
        const TokenRange whole = items[i].whole;
        if (begin <= whole.begin && end < whole.end) return whole.begin - begin;
    }
    return end - begin;
}

bool EncoderPass::lacks_room(const Request& request, std::uint32_t begin) const {
    const std::uint32_t end = begin + least_tokens(request, begin);
    return fit(request, {begin, end}, kNoPosition) < end;
}

std::uint32_t EncoderPass::least_tokens(const Request& request, std::uint32_t begin) const noexcept {
    if (engine_.config.encoder.split_inputs) return 1;
    const auto& items = request.encoder->items();
    const std::size_t first = request.encoder->first_after(begin);
    return first < items.size() && items[first].whole.begin == begin ? items[first].whole.end - begin : 1;
}

void EncoderPass::commit(Request& request, std::uint32_t num_tokens) {
    EncoderCache& cache = engine_.encoder_cache;
    auto& items = request.encoder->items();
    const std::uint32_t begin = request.num_computed_tokens;
    const std::uint32_t end = begin + num_tokens;
    const std::size_t first = request.encoder->first_after(begin);
    note_consumed(request);  // what the prefix cache covers
    const auto for_each_read = [&](auto visit) {
        for (std::size_t i = first; i < items.size() && items[i].place.begin < end; ++i) {
            if (!items[i].ref && items[i].next_embed(begin) < end) visit(items[i]);
        }
    };
    // What is there is held before anything is evicted for the rest.
    bool holds = false;
    for_each_read([&](EncoderInput& item) {
        holds = true;
        if (cache.is_cached(item.name)) item.ref = cache.hold(item.name);
    });
    for_each_read([&](EncoderInput& item) {
        if (cache.is_cached(item.name)) {
            item.ref = cache.hold(item.name);
            return;
        }
        item.ref = cache.allocate(item.name);
        budget_embeds_ -= cache.num_embeds(item.name);
        plan_.encoder_runs.push_back({&request, item.number});
        plan_.num_run_embeds += cache.num_embeds(item.name);
    });
    if (holds && std::ranges::find(engine_.encoder_holders, &request) == engine_.encoder_holders.end())
        engine_.encoder_holders.push_back(&request);
}

Request* EncoderPass::stuck_holder_behind(const Request& request) const noexcept {
    Request* last = nullptr;
    for (Request* holder : engine_.encoder_holders) {
        const bool is_stuck =
            holder->num_in_flight_tokens == 0 && holder->last_planned_step < engine_.last_prefill_step;
        if (!is_stuck || !(request.order < holder->order)) continue;
        if (last == nullptr || last->order < holder->order) last = holder;
    }
    return last;
}

void EncoderPass::close() { plan_.evicted_encoder_outputs = engine_.encoder_cache.take_evicted(); }

}  // namespace tokenspeed::scheduler_fsm
