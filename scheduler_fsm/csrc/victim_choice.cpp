// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/victim_choice.h"

#include <array>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "scheduler_fsm/csrc/engine_state.h"

namespace tokenspeed::scheduler_fsm {
namespace {

// Looking further would cost more than a better victim saves, and would take KV from requests that are nearly first.
constexpr std::size_t kMaxCandidates = 8;

/// The last requests behind `request` that may be retracted, last first.
std::vector<Request*> candidates_behind(const EngineState& engine, const Request& request) {
    std::array<std::span<Request* const>, 3> sets{engine.decoding.items(), engine.prefilling.items(),
                                                  engine.transfers.loaded.items()};
    const auto last_order = [](std::span<Request* const> set) { return set.back()->order; };
    std::vector<Request*> found;
    while (found.size() < kMaxCandidates) {
        std::span<Request* const>* latest = nullptr;
        for (auto& set : sets) {
            if (!set.empty() && (latest == nullptr || last_order(*latest) < last_order(set))) latest = &set;
        }
        if (latest == nullptr || !(request.order < last_order(*latest))) break;
        Request* last = latest->back();
        *latest = latest->first(latest->size() - 1);
        if (last->last_planned_step != engine.step) found.push_back(last);
    }
    return found;
}

/// Blocks that only `request` owns; counted no further than `enough`.
std::uint32_t num_freed_blocks(const EngineState& engine, const Request& request, std::uint32_t enough) {
    std::uint32_t sum = 0;
    for (kv_flat::GroupId group = 0; group < request.kv()->num_groups(); ++group) {
        const auto blocks = request.kv()->table(group).ids();
        // The head of a table is what others share.
        for (auto block = blocks.rbegin(); block != blocks.rend() && sum < enough; ++block) {
            sum += *block != kv_flat::kNullBlock && engine.kv.pool().num_owners(*block) == 1;
        }
    }
    return sum;
}

/// Tokens that are computed again when it comes back, as far as that depends on who is chosen. What it published stays
/// hittable, and how much of that is taken before it comes back depends on what the others need.
std::uint32_t num_restored_tokens(const EngineState& engine, const Request& request) {
    const bool finds_its_blocks = engine.kv.config().prefix_caching && request.may_read_cache;
    return finds_its_blocks ? 0 : request.num_computed_tokens;
}

Request* cheapest(const EngineState& engine, std::span<Request* const> candidates, std::uint32_t num_blocks) {
    Request* victim = nullptr;
    std::uint32_t most_freed = 0;
    std::uint32_t least_restored = 0;
    for (Request* candidate : candidates) {
        const std::uint32_t freed = num_freed_blocks(engine, *candidate, num_blocks);
        const std::uint32_t restored = num_restored_tokens(engine, *candidate);
        const bool suffices = freed == num_blocks;
        const bool is_better = freed > most_freed || (suffices && restored < least_restored);
        if (victim == nullptr || is_better) {
            victim = candidate;
            most_freed = freed;
            least_restored = restored;
        }
        if (suffices && least_restored == 0) break;
    }
    return victim;
}

Request* chosen(const EngineState& engine, std::span<Request* const> candidates, std::uint32_t num_blocks) {
    std::vector<VictimCandidate> described;
    for (Request* candidate : candidates) {
        described.push_back(
            {candidate, num_freed_blocks(engine, *candidate, num_blocks), num_restored_tokens(engine, *candidate)});
    }
    const std::size_t answer = engine.victim_choice(described, num_blocks);
    if (answer < candidates.size()) return candidates[answer];
    throw std::out_of_range("the victim choice answered " + std::to_string(answer) + "; allowed: a number below " +
                            std::to_string(candidates.size()));
}

}  // namespace

Request* choose_victim(const EngineState& engine, const Request& request, std::uint32_t num_blocks) {
    const std::vector<Request*> candidates = candidates_behind(engine, request);
    Request* victim = engine.victim_choice && !candidates.empty() ? chosen(engine, candidates, num_blocks)
                                                                  : cheapest(engine, candidates, num_blocks);
    // A loaded one in front may wait for this very request's slot. What it loses is still cached, or loaded again.
    const auto loaded = engine.transfers.loaded.items();
    return victim == nullptr && !loaded.empty() ? loaded.back() : victim;
}

}  // namespace tokenspeed::scheduler_fsm
