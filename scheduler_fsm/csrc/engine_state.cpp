// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/engine_state.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace tokenspeed::scheduler_fsm {

void EngineState::enqueue(Request& request) {
    if (may_wait(request)) {
        waiting.push(request);
    } else {
        ++num_parked;
    }
}

void EngineState::dequeue(Request& request) {
    if (std::holds_alternative<Prefilling>(request.state)) {
        prefilling.erase(request);
        adapters.remove(request.adapter);
    } else if (std::holds_alternative<Decoding>(request.state)) {
        decoding.erase(request);
        adapters.remove(request.adapter);
    } else if (request.is_idle()) {
        std::erase(idle, &request);
        adapters.remove(request.adapter);
    } else if (request.is_loading()) {
        transfers.loading.erase(request);
    } else if (request.is_loaded()) {
        transfers.loaded.erase(request);
    } else if (!waiting.erase(request)) {
        --num_parked;
    }
}

void EngineState::admit(Request& request, kv_flat::KvSequence&& kv_sequence) {
    dequeue(request);
    if (auto* submitted = std::get_if<Submitted>(&request.state)) {
        request.state = scheduler_fsm::admit(std::move(*submitted), std::move(kv_sequence), slots.take());
    } else {
        auto& retracted = std::get<Retracted>(request.state);
        request.state = scheduler_fsm::admit(std::move(retracted), std::move(kv_sequence), slots.take());
    }
    note_admission(request);
}

void EngineState::note_admission(Request& request) {
    ++request.incarnation;
    request.num_overtaken_steps = 0;
    request.memo = {};
    request.load.barred = false;
    request.table_is_new = true;
    request.has_news = true;
    prefilling.insert(request);
    adapters.add(request.adapter);
}

void EngineState::start_decoding(Request& request) {
    prefilling.erase(request);
    request.state = scheduler_fsm::start_decoding(std::get<Prefilling>(std::move(request.state)));
    decoding.insert(request);
}

void EngineState::end_turn(Request& request) {
    // A retracted one is parked already: its steps were in flight until now.
    if (kv.state_block_tokens() > 0 && request.is_running()) {
        // Steps in flight may have carried its states past the end of the turn: the next one starts from the cache.
        request.awaits_input = true;
        retract(request);
    } else if (auto* state = std::get_if<Decoding>(&request.state)) {
        decoding.erase(request);
        request.state = scheduler_fsm::end_turn(std::move(*state));
        idle.push_back(&request);
    }
    request.close_turn();
    ++num_awaiting_input;
}

void EngineState::start_turn(Request& request, TurnInput input, OrderKey order) {
    request.lane_key = prefilled_tokens + input.tokens.size();
    request.open_turn(std::move(input), order);
    --num_awaiting_input;
    if (auto* state = std::get_if<Idle>(&request.state)) {
        std::erase(idle, &request);
        request.state = scheduler_fsm::start_turn(std::move(*state));
        prefilling.insert(request);
    } else {
        --num_parked;
        enqueue(request);
    }
}

void EngineState::give_blocks_up(Request& request) {
    const auto give_up = [&](auto&& state) {
        if (transfers.store == nullptr || request.num_in_flight_tokens == 0) {
            request.state = scheduler_fsm::retract(std::move(state));
            return;
        }
        // A load into these blocks would not be ordered with the steps in flight.
        auto [retracted, sequence] = scheduler_fsm::retract_fenced(std::move(state));
        transfers.fenced.push_back({request.handle, request.last_planned_step, std::move(sequence)});
        request.state = std::move(retracted);
    };
    if (auto* prefilling_state = std::get_if<Prefilling>(&request.state)) {
        give_up(std::move(*prefilling_state));
    } else if (auto* loaded = std::get_if<Prefetched>(&request.state)) {
        request.state = scheduler_fsm::retract(std::move(*loaded));
    } else if (auto* idle_state = std::get_if<Idle>(&request.state)) {
        request.state = scheduler_fsm::retract(std::move(*idle_state));
    } else {
        give_up(std::get<Decoding>(std::move(request.state)));
    }
}

void EngineState::drop_encoder_outputs(Request& request) {
    request.encoder->let_go(kNoPosition);
    request.encoder->restart();
    std::erase(encoder_holders, &request);
}

void EngineState::reset_encoder_cache() {
    for (Request* request : encoder_holders) request->encoder->let_go(kNoPosition);
    encoder_holders.clear();
    encoder_cache.reset();
}

void EngineState::publish_states(Request& request) {
    if (kv.state_block_tokens() == 0 || !request.is_running()) return;
    // Nothing goes on from them in place any more.
    constexpr std::uint32_t kNowhere = std::numeric_limits<std::uint32_t>::max();
    static_cast<void>(kv.keep_states(*request.kv(), request.chain, request.tokens.all(), kNowhere, 0));
}

void EngineState::retract(Request& request) {
    publish_states(request);
    dequeue(request);
    if (request.encoder) drop_encoder_outputs(request);
    // Nothing is said about when it is back: as soon as there is room.
    const auto leaving = kv.depart({});
    give_blocks_up(request);
    if (transfers.needs_delivery && request.num_in_flight_tokens > 0)
        request.void_until_step = request.last_planned_step;
    request.load = {};
    request.num_computed_tokens = 0;
    request.num_placeholders = 0;
    request.drafts.clear();
    request.retracted_step = step;
    request.has_news = true;
    request.lane_key = prefilled_tokens + request.num_known_tokens();
    ++request.num_retractions;
    ++counters.num_retractions;
    enqueue(request);
}

void EngineState::finish(Request& request, FinishReason why) {
    // What was certainly written stays hittable for the next turn of the same session.
    if (auto* sequence = request.kv(); sequence != nullptr && !request.is_loading()) {
        const std::uint32_t confirmed = std::min(request.num_confirmed_tokens(), request.num_known_tokens());
        kv.publish(*sequence, request.chain, request.tokens.all(), confirmed);
    }
    publish_states(request);
    dequeue(request);
    if (request.encoder) drop_encoder_outputs(request);
    num_awaiting_input -= request.awaits_input;
    if (transfers.store != nullptr && request.kv() != nullptr) {
        Transfers(*this).drain(request, why);
        return;
    }
    const auto leaving = kv.depart(departure_of(request));
    request.state = std::visit(
        [why](auto&& state) -> Finished {
            using State = std::remove_cvref_t<decltype(state)>;
            if constexpr (requires(State&& from) { scheduler_fsm::finish(std::move(from), why); }) {
                return scheduler_fsm::finish(std::move(state), why);
            } else {
                throw std::logic_error("a request that has ended or loads cannot finish");
            }
        },
        std::move(request.state));
}

void EngineState::plan_copies(kv_flat::KvSequence& sequence, ExecutionPlan& plan) {
    for (kv_flat::BlockCopy& copy : sequence.take_copies()) {
        ++counters.num_block_copies;
        plan.copies.push_back({copy.source.id(), copy.target->id()});
        copy_pins.push_back({step, *std::move(copy.target)});
        copy_pins.push_back({step, std::move(copy.source)});
    }
}

void EngineState::unpark_if_drained(Request& request) {
    if (!request.was_retracted() || !may_wait(request)) return;
    --num_parked;
    waiting.push(request);
}

}  // namespace tokenspeed::scheduler_fsm
