// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/prefill_pass.h"

#include <algorithm>
#include <iterator>

namespace tokenspeed::scheduler_fsm {

void PrefillPass::run() {
    EngineState& engine = step_.engine;
    if (is_throttled()) return;
    if (!engine.transfers.loaded.empty()) admission_.start_loaded();
    serve_in_order();
    if (cut_ != nullptr) {
        serve_short_lane(lane_share());
        // The lane may have taken its blocks for an older one.
        if (cut_->is_prefilling()) static_cast<void>(serve(*cut_, step_.room_for_one()));
    }
    admission_.close();
    engine.lane_tokens = lane_lack_;
    engine.last_prefill_step = engine.step;
    engine.prefill_bound = !engine.waiting.empty();
}

bool PrefillPass::is_throttled() const {
    const EngineState& engine = step_.engine;
    // With more prompts than one step could take, waiting would only let the queue grow.
    if (engine.prefill_bound || engine.decoding.empty()) return false;
    return step_.options.throttle_prefills || engine.num_full_steps < engine.next_prefill_step;
}

std::uint32_t PrefillPass::chunk_limit() const noexcept {
    const EngineState& engine = step_.engine;
    const std::uint32_t num_requests = engine.num_running() + engine.waiting.size();
    std::uint32_t limit = engine.config.long_prefill_tokens;
    if (limit == 0 || num_requests <= 1) return ~std::uint32_t{0};
    if (engine.config.long_prefill_adaptive) limit = std::max(limit, engine.config.max_scheduled_tokens / num_requests);
    return limit;
}

std::uint32_t PrefillPass::least_tokens(const Request& request) const noexcept {
    return request.encoder ? step_.encoders.least_tokens(request, request.num_computed_tokens) : 1;
}

std::uint32_t PrefillPass::wanted_tokens(const Request& request) {
    const std::uint32_t wanted = std::min(step_.computable_tokens(request), chunk_limit());
    if (!request.encoder || wanted == 0) return wanted;
    const std::uint32_t begin = request.num_computed_tokens;
    const std::uint32_t most = std::max(wanted, least_tokens(request));
    while (step_.encoders.lacks_room(request, begin)) {
        // One behind it may hold encoder outputs and wait for KV that this one holds.
        Request* victim = step_.encoders.stuck_holder_behind(request);
        if (victim == nullptr) return 0;
        step_.retract(*victim);
    }
    return step_.encoders.fitting_tokens(request, begin, most);
}

void PrefillPass::note_lack(const Request& request) noexcept {
    std::uint32_t& lack = cut_ != nullptr && cut_ != &request ? lane_lack_ : step_.lacking_tokens;
    lack = std::max(lack, least_tokens(request));
}

PrefillPass::LaneShare PrefillPass::lane_share() const noexcept {
    const EngineState& engine = step_.engine;
    const std::uint32_t room = step_.room_for_one();
    const std::uint32_t least = least_tokens(*cut_);
    const std::uint32_t drafter = engine.config.drafter_slots;
    const bool is_even = engine.step % 2 == 0;
    // What must not be split needs its whole at once: the two sides get theirs in turn.
    if (is_even && engine.lane_tokens > 0) return {std::max(room - room / 2, std::min(engine.lane_tokens, room)), 0};
    // Where a row of each has no room, the one that is first in the order goes on.
    if (room <= least + drafter) return {};
    // The odd token goes to either side in turn.
    const std::uint32_t half = (room - drafter + (is_even ? 0 : 1)) / 2;
    return {room - drafter - std::max(half, least), least + drafter};
}

bool PrefillPass::others_want(const Request& request) const {
    const EngineState& engine = step_.engine;
    for (const Request* other : engine.prefilling.items()) {
        if (other != &request && !step_.is_planned(*other)) return true;
    }
    return admission_.is_open() && !engine.waiting.empty();
}

bool PrefillPass::start(Request& request) {
    // Without chunked prefill a prompt runs whole or waits for a step of its own.
    if (!step_.engine.config.chunked_prefill && step_.computable_tokens(request) > step_.room_for_one()) {
        admission_.pass_over(request);
        return false;
    }
    return admission_.try_start(request);
}

void PrefillPass::serve_in_order() {
    EngineState& engine = step_.engine;
    const auto items = engine.prefilling.items();
    const std::vector<Request*> running(items.begin(), items.end());
    auto next_running = running.begin();
    auto next_waiting = engine.waiting.by_order().begin();
    while (step_.room_for_one() > 0) {
        const bool waiting_left = admission_.is_open() && next_waiting != engine.waiting.by_order().end();
        if (next_running == running.end() && !waiting_left) return;
        Request* request = nullptr;
        if (next_running != running.end() && (!waiting_left || (*next_running)->order < (*next_waiting)->order)) {
            request = *next_running++;
            if (!request->is_prefilling()) continue;  // retracted for an older one
            // The input of a session, too, runs whole or waits when prompts are not split.
            if (!engine.config.chunked_prefill && step_.computable_tokens(*request) > step_.room_for_one()) continue;
        } else {
            request = *next_waiting++;  // before it leaves the queue
            if (!start(*request)) continue;
        }
        const std::uint32_t wanted = wanted_tokens(*request);
        if (wanted > step_.room_for_one() && others_want(*request)) {
            cut_ = request;
            return;
        }
        static_cast<void>(serve(*request, wanted));
    }
}

void PrefillPass::serve_short_lane(LaneShare share) {
    EngineState& engine = step_.engine;
    std::vector<Request*> running;
    for (Request* request : engine.prefilling.items()) {
        if (request != cut_ && !step_.is_planned(*request)) running.push_back(request);
    }
    std::ranges::sort(running, {},
                      [](const Request* request) { return std::pair(request->order.priority, request->lane_key); });
    auto next_running = running.begin();
    auto next_waiting = engine.waiting.by_lane().begin();
    while (share.num_tokens > 0 && step_.room_for_one() > share.kept_tokens) {
        const bool waiting_left = admission_.is_open() && next_waiting != engine.waiting.by_lane().end();
        if (next_running == running.end() && !waiting_left) return;
        const auto key = [](const Request* request) { return std::pair(request->order.priority, request->lane_key); };
        Request* request = nullptr;
        if (next_running != running.end() && (!waiting_left || key(*next_running) <= key(*next_waiting))) {
            request = *next_running++;
            if (!request->is_prefilling()) continue;
        } else {
            request = *next_waiting++;
            if (!start(*request)) continue;
        }
        const std::uint32_t most = std::min(share.num_tokens, step_.room_for_one() - share.kept_tokens);
        share.num_tokens -= serve(*request, std::min(wanted_tokens(*request), most));
    }
}

std::uint32_t PrefillPass::serve(Request& request, std::uint32_t num_tokens) {
    EngineState& engine = step_.engine;
    if (num_tokens == 0) return 0;
    num_tokens = std::min(num_tokens, step_.room_for_one());
    const std::uint32_t least = least_tokens(request);
    if (num_tokens < least) {
        note_lack(request);
        return 0;
    }
    engine.kv.retire(*request.kv(), request.num_confirmed_tokens(), request.num_computed_tokens);
    if (request.encoder) num_tokens = step_.encoders.fitting_tokens(request, request.num_computed_tokens, num_tokens);
    std::uint32_t fitting = step_.fitting_tokens(request, num_tokens);
    if (fitting < least && num_tokens > 0 && request.num_in_flight_tokens == 0) {
        // Older decodes grew into what it was promised. With steps in flight, waiting for them may already help.
        if (step_.make_room(request, step_.missing_blocks(request, least)))
            fitting = step_.fitting_tokens(request, num_tokens);
        if (fitting < least) step_.end_if_pool_is_its_own(request);
    }
    if (fitting < least) return 0;
    fitting = std::max(step_.chunk_tokens(request, fitting), least);
    if (request.encoder) {
        fitting = step_.encoders.fitting_tokens(request, request.num_computed_tokens, fitting);
        step_.encoders.commit(request, fitting);
    }
    engine.prefilled_tokens += fitting;
    engine.next_prefill_step = engine.num_full_steps + engine.config.prefill_interval_steps;
    step_.add_row(request, fitting);
    if (request.is_prefilling()) {
        const std::uint32_t promised = engine.kv.blocks_to_complete(*request.kv(), request.num_known_tokens());
        step_.reservations.set(request, promised);
    }
    return fitting;
}

}  // namespace tokenspeed::scheduler_fsm
