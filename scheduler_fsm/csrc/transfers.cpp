// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/transfers.h"

#include <algorithm>
#include <limits>
#include <unordered_set>
#include <utility>

#include "scheduler_fsm/csrc/engine_state.h"

namespace tokenspeed::scheduler_fsm {
namespace {

// A step asks again about no more than this many undecided requests, however many there are.
constexpr std::size_t kMaxAskedAgain = 16;

using BlockSet = std::unordered_set<kv_flat::BlockId>;

/// The tokens in front of the first of `blocks` in any table of the sequence, at most `num_tokens`.
std::uint32_t valid_tokens(const kv_flat::KvSequence& kv, std::span<const kv_flat::GroupSpec> groups,
                           const BlockSet& blocks, std::uint32_t num_tokens) {
    std::uint32_t valid = num_tokens;
    for (kv_flat::GroupId group = 0; group < kv.num_groups(); ++group) {
        const auto ids = kv.table(group).ids();
        const std::uint32_t block_tokens = groups[group].block_tokens;
        for (std::uint32_t index = 0; index < ids.size() && index * block_tokens < valid; ++index) {
            if (blocks.contains(ids[index])) valid = index * block_tokens;
        }
    }
    return valid;
}

/// Makes the blocks unhittable that hold tokens at or after `first_token`.
void unpublish_from(kv_flat::BlockPool& pool, const kv_flat::KvSequence& kv, std::span<const kv_flat::GroupSpec> groups,
                    std::uint32_t first_token) {
    for (kv_flat::GroupId group = 0; group < kv.num_groups(); ++group) {
        const auto ids = kv.table(group).ids();
        const std::size_t first = std::min<std::size_t>(first_token / groups[group].block_tokens, ids.size());
        for (const kv_flat::BlockId block : ids.subspan(first)) {
            if (block != kv_flat::kNullBlock) pool.unpublish(block);
        }
    }
}

}  // namespace

void Transfers::prefetch(Request& request, kv_flat::KvSequence&& kv) {
    engine_.dequeue(request);
    request.num_overtaken_steps = 0;
    request.memo = {};
    if (auto* submitted = std::get_if<Submitted>(&request.state)) {
        request.state = scheduler_fsm::prefetch(std::move(*submitted), std::move(kv));
    } else {
        request.state = scheduler_fsm::prefetch(std::get<Retracted>(std::move(request.state)), std::move(kv));
    }
    engine_.transfers.loading.insert(request);
}

void Transfers::put_aside(Request& request) {
    engine_.dequeue(request);
    request.load.undecided = true;
    ++engine_.num_parked;
    engine_.transfers.undecided.push_back(request.handle);
}

void Transfers::take_undecided_back() {
    auto& undecided = engine_.transfers.undecided;
    for (std::size_t left = std::min(undecided.size(), kMaxAskedAgain); left > 0; --left) {
        Request* request = engine_.requests.find(undecided.front());
        undecided.pop_front();
        if (request == nullptr || request->is_finished() || !request->load.undecided) continue;
        request->load.undecided = false;
        --engine_.num_parked;
        engine_.enqueue(*request);
    }
}

bool Transfers::load_done(Request& request) {
    if (auto* draining = std::get_if<Draining>(&request.state); draining != nullptr && draining->awaits_load) {
        draining->awaits_load = false;
        settle(request);
        return true;
    }
    if (!request.is_loading()) {
        ++engine_.transfers.num_unknown_reports;
        return false;
    }
    const std::uint32_t num_whole = std::min(request.load.valid_tokens, request.num_known_tokens());
    engine_.kv.publish(*request.kv(), request.chain, request.tokens.all(), num_whole);
    engine_.transfers.loading.erase(request);
    if (request.load.valid_tokens < request.load.end_tokens) {
        give_up_load(request);
        return true;
    }
    request.load.warm_tokens = request.load.end_tokens;
    request.state = scheduler_fsm::load_done(std::get<Prefetching>(std::move(request.state)));
    engine_.transfers.loaded.insert(request);
    return true;
}

void Transfers::give_up_load(Request& request) {
    auto& loading = std::get<Prefetching>(request.state);
    if (request.num_retractions > 0) {
        request.state = load_failed<Retracted>(std::move(loading));
    } else {
        request.state = load_failed<Submitted>(std::move(loading));
    }
    request.num_computed_tokens = 0;
    request.load = {};
    request.load.barred = true;
    engine_.enqueue(request);
}

void Transfers::start_loaded(Request& request) {
    engine_.transfers.loaded.erase(request);
    request.state = scheduler_fsm::admit(std::get<Prefetched>(std::move(request.state)), engine_.slots.take());
    engine_.note_admission(request);
}

void Transfers::fail_load(Request& request) noexcept {
    if (request.is_loading()) request.load.valid_tokens = request.load.begin_tokens;
}

void Transfers::drain(Request& request, FinishReason why) {
    if (auto* loading = std::get_if<Prefetching>(&request.state)) {
        request.state = scheduler_fsm::drain(std::move(*loading), why);
    } else if (auto* loaded = std::get_if<Prefetched>(&request.state)) {
        request.state = scheduler_fsm::drain(std::move(*loaded), why);
    } else if (auto* prefilling = std::get_if<Prefilling>(&request.state)) {
        request.state = scheduler_fsm::drain(std::move(*prefilling), why);
    } else {
        request.state = scheduler_fsm::drain(std::get<Decoding>(std::move(request.state)), why);
    }
    ++engine_.transfers.num_draining;
}

void Transfers::set_verdict(Request& request, bool awaits_send) {
    auto* draining = std::get_if<Draining>(&request.state);
    if (draining == nullptr) {
        engine_.requests.erase(request.handle);
        return;
    }
    draining->awaits_verdict = false;
    draining->awaits_send = awaits_send;
    settle(request);
}

bool Transfers::send_done(Request& request) {
    auto* draining = std::get_if<Draining>(&request.state);
    if (draining == nullptr || !draining->awaits_send) {
        ++engine_.transfers.num_unknown_reports;
        return false;
    }
    draining->awaits_send = false;
    settle(request);
    return true;
}

void Transfers::settle(Request& request) {
    auto& draining = std::get<Draining>(request.state);
    if (draining.awaits_verdict || draining.awaits_send || draining.awaits_load) return;
    if (request.num_in_flight_tokens > 0) return;
    const auto leaving = engine_.kv.depart(EngineState::departure_of(request));
    request.state = scheduler_fsm::settle(std::move(draining));
    --engine_.transfers.num_draining;
    engine_.requests.erase(request.handle);
}

void Transfers::release_fenced() {
    const std::uint64_t oldest =
        engine_.in_flight.empty() ? std::numeric_limits<std::uint64_t>::max() : engine_.in_flight.front().step;
    std::erase_if(engine_.transfers.fenced, [oldest](const FencedSequence& entry) { return entry.last_step < oldest; });
}

std::vector<Request*> Transfers::invalidate(std::span<const kv_flat::BlockId> blocks) {
    const BlockSet invalid(blocks.begin(), blocks.end());
    const auto& groups = engine_.kv.config().groups;
    kv_flat::BlockPool& pool = engine_.kv.pool();
    std::vector<Request*> affected;
    const auto reads = [&](const kv_flat::KvSequence& kv, std::uint32_t num_tokens) {
        const std::uint32_t valid = valid_tokens(kv, groups, invalid, num_tokens);
        if (valid == num_tokens) return false;
        unpublish_from(pool, kv, groups, valid);
        return true;
    };
    constexpr std::uint32_t kAll = std::numeric_limits<std::uint32_t>::max();
    engine_.requests.for_each([&](Request& request) {
        if (request.kv() == nullptr) return;
        if (request.is_loading()) {
            request.load.valid_tokens = valid_tokens(*request.kv(), groups, invalid, request.load.valid_tokens);
        } else if (reads(*request.kv(), request.is_running() ? request.num_computed_tokens : kAll)) {
            request.void_until_step = engine_.step;
            if (!request.is_finished()) affected.push_back(&request);
        }
    });
    for (const FencedSequence& sequence : engine_.transfers.fenced) {
        if (!reads(sequence.kv, kAll)) continue;
        if (Request* owner = engine_.requests.find(sequence.owner)) owner->void_until_step = engine_.step;
    }
    for (const kv_flat::BlockId block : blocks) {
        if (block != kv_flat::kNullBlock && block <= pool.num_usable()) pool.unpublish(block);
    }
    return affected;
}

}  // namespace tokenspeed::scheduler_fsm
