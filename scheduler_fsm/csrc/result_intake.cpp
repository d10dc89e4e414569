// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/result_intake.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "scheduler_fsm/csrc/fetch_ahead.h"

namespace tokenspeed::scheduler_fsm {

StepRecord ResultIntake::apply(const ExecutionEvents& events, std::vector<Delivery>& deliveries) {
    const auto record = std::ranges::find(engine_.in_flight, events.step, &StepRecord::step);
    if (record == engine_.in_flight.end()) {
        ++engine_.counters.num_unknown_steps;
        return {};
    }
    check(*record, events);
    StepRecord taken = std::move(*record);
    engine_.in_flight.erase(record);
    if (engine_.transfers.store != nullptr) Transfers(engine_).release_fenced();
    std::erase_if(engine_.copy_pins, [&](const CopyPin& pin) { return pin.step <= events.step; });
    const auto request_at = [&](std::size_t row) { return engine_.requests.find(taken.rows[row].handle); };
    for (std::uint32_t i = 0; i < taken.rows.size(); ++i) {
        if (i + 2 * kFetchTurns < taken.rows.size()) engine_.requests.fetch(taken.rows[i + 2 * kFetchTurns].handle);
        fetch_parts_ahead(i, taken.rows.size(), request_at, [](const Request& request) {
            if (request.tokens.is_about_to_settle()) __builtin_prefetch(request.tokens.end_of_row(), 1);
        });
        apply_row(taken.step, taken.rows[i], i,
                  events.tokens.subspan(events.offsets[i], events.offsets[i + 1] - events.offsets[i]), deliveries);
    }
    return taken;
}

void ResultIntake::check(const StepRecord& record, const ExecutionEvents& events) const {
    const auto fail = [&](const std::string& what) {
        throw std::invalid_argument("results of step " + std::to_string(events.step) + ": " + what +
                                    "; nothing was applied");
    };
    if (events.offsets.size() != record.rows.size() + 1) {
        fail(std::to_string(events.offsets.size()) + " offsets for " + std::to_string(record.rows.size()) + " rows");
    }
    if (events.offsets.front() != 0 || events.offsets.back() != events.tokens.size() ||
        !std::ranges::is_sorted(events.offsets)) {
        fail("the offsets do not partition the " + std::to_string(events.tokens.size()) + " tokens");
    }
    for (std::size_t i = 0; i < record.rows.size(); ++i) {
        const StepRecord::Row& row = record.rows[i];
        if (i + kFetchTurns < record.rows.size()) engine_.requests.fetch(record.rows[i + kFetchTurns].handle);
        const Request* request = engine_.requests.find(row.handle);
        if (request == nullptr || request->is_finished()) continue;
        const auto tokens = events.tokens.subspan(events.offsets[i], events.offsets[i + 1] - events.offsets[i]);
        const std::size_t most = row.samples ? engine_.config.num_sampled_tokens + row.num_drafts : 0;
        if (tokens.size() > most) {
            fail("request " + request->label + " got " + std::to_string(tokens.size()) + " tokens; at most " +
                 std::to_string(most) + " are possible");
        }
        const auto negative = std::ranges::find_if(tokens, [](TokenId token) { return token < 0; });
        if (negative != tokens.end()) {
            fail("request " + request->label + " got token id " + std::to_string(*negative) + "; ids start at 0");
        }
    }
}

void ResultIntake::apply_row(std::uint64_t step, const StepRecord::Row& row, std::uint32_t row_index,
                             std::span<const TokenId> tokens, std::vector<Delivery>& deliveries) {
    Request* request = engine_.requests.find(row.handle);
    if (request == nullptr || request->is_finished()) {
        ++engine_.counters.num_late_rows;
        if (request != nullptr && request->is_draining()) {
            request->num_in_flight_tokens -= row.num_tokens;
            Transfers(engine_).settle(*request);
        }
        return;
    }
    request->num_in_flight_tokens -= row.num_tokens;
    if (row.turn != request->turn || step <= request->void_until_step) {
        // Sampled behind the end of a session's turn, or from KV that never came.
        engine_.unpark_if_drained(*request);
        return;
    }
    // A request that was retracted meanwhile keeps the tokens: they were sampled from KV that was valid when the step
    // ran.
    const bool is_current = row.incarnation == request->incarnation && request->is_running();
    if (is_current && !tokens.empty()) {
        take_back_rejected(*request, row, static_cast<std::uint32_t>(tokens.size()));
        request->num_placeholders -= std::min(request->num_placeholders, static_cast<std::uint32_t>(tokens.size()));
    }
    Delivery delivery;
    delivery.row = row_index;
    delivery.request = request;
    if (!tokens.empty()) {
        delivery.has_news = std::exchange(request->has_news, false);
        delivery.num_accepted_drafts = static_cast<std::uint32_t>(tokens.size()) - engine_.config.num_sampled_tokens;
        append_until_stop(*request, tokens, delivery);
        if (request->chain.is_due(request->tokens.size())) request->chain.extend(request->tokens.all());
    }
    if (delivery.finished && request->is_session) {
        engine_.end_turn(*request);
    } else if (delivery.finished) {
        engine_.finish(*request, delivery.stop.reason);
    } else {
        engine_.unpark_if_drained(*request);
    }
    deliveries.push_back(delivery);
}

void ResultIntake::take_back_rejected(Request& request, const StepRecord::Row& row,
                                      std::uint32_t num_sampled) const noexcept {
    if (row.num_drafts == 0) return;
    const std::uint32_t num_accepted = num_sampled - engine_.config.num_sampled_tokens;
    const std::uint32_t num_rejected = row.num_drafts - num_accepted;
    request.num_computed_tokens -= num_rejected;
    request.num_placeholders -= std::min(request.num_placeholders, num_rejected);
}

void ResultIntake::append_until_stop(Request& request, std::span<const TokenId> tokens, Delivery& delivery) const {
    for (const TokenId token : tokens) {
        request.append_output(token);
        ++delivery.num_new_tokens;
        const auto stop =
            check_stop(request.stop, request.tokens, request.num_prompt_tokens, engine_.config.max_model_tokens);
        if (!stop) continue;
        delivery.finished = true;
        delivery.stop = *stop;
        return;
    }
}

}  // namespace tokenspeed::scheduler_fsm
