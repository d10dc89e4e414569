// SPDX-License-Identifier: Apache-2.0
// Walks every order of events for a few requests in a tiny pool, and checks the invariants in every state that it
// reaches.
#include <catch2/catch.hpp>
#include <cstdio>
#include <set>
#include <sstream>

#include "tests/cpp/scheduler_fsm/fixture.h"

using namespace tokenspeed::scheduler_fsm;
using namespace tokenspeed::scheduler_fsm::testing;

namespace {

constexpr std::uint32_t kNumRequests = 3;
constexpr int kDepth = 12;

// Request 1 is a session that gets one more chunk of input.
enum class Event : std::uint8_t { kAdd, kPlan, kAdvance, kAbort, kRetractAll, kFeed };

struct Move {
    Event event;
    std::uint32_t request = 0;
};

/// A scheduler that is rebuilt from a list of moves: its state cannot be copied, so a path is replayed.
class World {
  public:
    World() : scheduler_(config_of({.num_blocks = 6, .block_tokens = 2, .budget = 4, .max_num_seqs = 2})) {}

    /// False when the move is not possible here.
    bool apply(const Move& move) {
        switch (move.event) {
            case Event::kAdd:
                return add(move.request);
            case Event::kPlan:
                return plan();
            case Event::kAdvance:
                return advance();
            case Event::kAbort:
                return abort(move.request);
            case Event::kRetractAll:
                if (scheduler_.num_running() + scheduler_.state().num_idle() == 0) return false;
                scheduler_.retract_all();
                static_cast<void>(scheduler_.take_outside_retractions());
                return true;
            case Event::kFeed:
                return feed();
        }
        return false;
    }

    void check() const { scheduler_.check_integrity(); }

    /// What later behaviour depends on, as text: paths that meet here need to be followed once.
    [[nodiscard]] std::string fingerprint() const {
        std::ostringstream text;
        for (std::uint32_t i = 0; i < kNumRequests; ++i) {
            const Request* request = added_[i] ? scheduler_.find(handles_[i]) : nullptr;
            text << (added_[i] ? (request == nullptr ? "gone" : std::string(state_name(request->state))) : "new");
            if (request != nullptr) {
                text << request->num_known_tokens() << ',' << request->num_computed_tokens << ','
                     << request->num_in_flight_tokens << ',' << request->order.sequence << ',' << request->turn << ','
                     << request->awaits_input;
            }
            text << ';';
        }
        text << scheduler_.state().in_flight.size() << ';' << scheduler_.state().step % 2 << ';';
        for (const auto block : scheduler_.state().kv.pool().free_order()) text << block << ' ';
        text << scheduler_.state().kv.pool().num_cached();
        return text.str();
    }

  private:
    bool add(std::uint32_t index) {
        if (added_[index]) return false;
        // Two share a prefix, one is long enough to need the whole pool.
        constexpr std::uint32_t kPrompt[] = {5, 5, 9};
        auto spec = spec_of(std::string(1, static_cast<char>('a' + index)), kPrompt[index], 3, index < 2 ? 1 : 2, 2);
        spec.is_session = index == 1;
        auto outcome = scheduler_.submit(std::move(spec));
        handles_[index] = std::get<RequestHandle>(outcome);
        added_[index] = true;
        return true;
    }
    bool feed() {
        const Request* request = added_[1] ? scheduler_.find(handles_[1]) : nullptr;
        if (request == nullptr || !request->awaits_input || request->turn > 1) return false;
        REQUIRE_FALSE(scheduler_.feed(handles_[1], {{50, 51}, request->stop, 0.0}).has_value());
        return true;
    }
    bool plan() {
        const std::uint32_t num_unfinished = scheduler_.num_running() + scheduler_.num_waiting();
        if (scheduler_.state().in_flight.size() >= 2 || num_unfinished == scheduler_.state().num_awaiting_input)
            return false;
        const ExecutionPlan& plan = scheduler_.plan();
        std::set<const Request*> seen;
        std::uint32_t sum = 0;
        for (const PlanRow& row : plan.rows) {
            REQUIRE(seen.insert(row.request).second);
            REQUIRE(row.request->is_running());
            REQUIRE(row.num_tokens > 0);
            sum += row.num_tokens;
        }
        REQUIRE(sum == plan.num_tokens);
        REQUIRE(sum <= 4);
        for (const Request* request : plan.retracted) REQUIRE(seen.count(request) == 0);
        release(plan.ended);
        return true;
    }
    bool advance() {
        if (scheduler_.state().in_flight.empty()) return false;
        const StepRecord& record = scheduler_.state().in_flight.front();
        std::vector<TokenId> tokens;
        std::vector<std::uint32_t> offsets = {0};
        for (const StepRecord::Row& row : record.rows) {
            if (row.samples) tokens.push_back(7);
            offsets.push_back(static_cast<std::uint32_t>(tokens.size()));
        }
        std::vector<Request*> finished;
        for (const Delivery& delivery : scheduler_.advance({record.step, tokens, offsets})) {
            if (delivery.request->is_finished()) finished.push_back(delivery.request);
        }
        release(finished);
        return true;
    }
    bool abort(std::uint32_t index) {
        if (!added_[index] || !scheduler_.finish(handles_[index], FinishReason::kAbort)) return false;
        scheduler_.release(handles_[index]);
        return true;
    }
    void release(const std::vector<Request*>& requests) {
        std::vector<RequestHandle> handles;
        for (const Request* request : requests) handles.push_back(request->handle);
        for (const RequestHandle handle : handles) scheduler_.release(handle);
    }

    Scheduler scheduler_;
    bool added_[kNumRequests] = {};
    RequestHandle handles_[kNumRequests];
};

}  // namespace

TEST_CASE("every order of events keeps every invariant") {
    std::vector<Move> moves = {{Event::kPlan}, {Event::kAdvance}, {Event::kRetractAll}, {Event::kFeed}};
    for (std::uint32_t i = 0; i < kNumRequests; ++i) {
        moves.push_back({Event::kAdd, i});
        moves.push_back({Event::kAbort, i});
    }
    std::set<std::string> seen;
    std::vector<std::vector<Move>> frontier = {{}};
    std::size_t num_transitions = 0;
    for (int depth = 0; depth < kDepth; ++depth) {
        std::vector<std::vector<Move>> next;
        for (const auto& path : frontier) {
            for (const Move& move : moves) {
                World world;
                for (const Move& earlier : path) world.apply(earlier);
                if (!world.apply(move)) continue;
                ++num_transitions;
                REQUIRE_NOTHROW(world.check());
                if (!seen.insert(world.fingerprint()).second) continue;
                next.push_back(path);
                next.back().push_back(move);
            }
        }
        frontier = std::move(next);
    }
    std::printf("walked %zu transitions to depth %d, %zu states\n", num_transitions, kDepth, seen.size());
    CHECK(seen.size() > 1000);
}
