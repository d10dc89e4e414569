// SPDX-License-Identifier: Apache-2.0
// Walks every order of events for a few requests in a tiny pool, and checks the invariants in every state that it
// reaches.
#include <catch2/catch.hpp>
#include <cstdio>
#include <set>
#include <span>
#include <sstream>

#include "tests/cpp/scheduler_fsm/fixture.h"

using namespace tokenspeed::scheduler_fsm;
using namespace tokenspeed::scheduler_fsm::testing;

namespace {

constexpr std::uint32_t kNumRequests = 3;
constexpr int kDepth = 12;

constexpr int kStoreDepth = 9;

enum class Event : std::uint8_t {
    kAdd,
    kPlan,
    kAdvance,
    kAbort,
    kRetractAll,
    kFeed,  // request 1 is a session that gets one more chunk of input; not with a store
    // Only with a store.
    kLoadDone,
    kLoadFailed,
    kSendDone,
    kInvalidate,
};

/// Loads the first block of `a` beside the steps and that of `b` as a part of one; is undecided about `c` at first.
class Store final : public ExternalKv {
  public:
    [[nodiscard]] Offer ask(const Request& request, std::uint32_t num_cached_tokens) override {
        if (request.label == "c" && num_asked_++ == 0) return {.is_undecided = true};
        if (request.label == "c" || num_cached_tokens > 0) return {};
        return {.num_tokens = 2, .is_async = request.label == "a"};
    }
    void accept(const Request& request, std::uint32_t num_tokens) override {
        REQUIRE(request.kv() != nullptr);
        REQUIRE((request.is_loading() || request.is_prefilling()));
        REQUIRE((num_tokens == 0 || num_tokens == 2));
    }
    [[nodiscard]] std::uint32_t num_asked() const noexcept { return num_asked_; }

  private:
    std::uint32_t num_asked_ = 0;
};

struct Move {
    Event event;
    std::uint32_t request = 0;
};

/// A scheduler that is rebuilt from a list of moves: its state cannot be copied, so a path is replayed.
class World {
  public:
    explicit World(bool has_store)
        : has_store_(has_store),
          scheduler_(config_of({.num_blocks = 6, .block_tokens = 2, .budget = 4, .max_num_seqs = 2})) {
        if (has_store) scheduler_.attach(store_, true);
    }

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
            case Event::kLoadDone:
                return added_[move.request] && scheduler_.load_done(handles_[move.request]);
            case Event::kLoadFailed:
                if (!added_[move.request]) return false;
                scheduler_.fail_load(handles_[move.request]);
                return scheduler_.load_done(handles_[move.request]);
            case Event::kSendDone:
                return added_[move.request] && scheduler_.send_done(handles_[move.request]);
            case Event::kInvalidate:
                return invalidate(move.request);
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
                text << ',' << request->load.valid_tokens << request->load.barred << request->load.undecided
                     << (request->void_until_step >= scheduler_.state().step);
                if (const auto* draining = std::get_if<Draining>(&request->state))
                    text << draining->awaits_send << draining->awaits_load;
            }
            text << ';';
        }
        text << scheduler_.state().in_flight.size() << ';' << scheduler_.state().step % 2 << ';';
        for (const auto block : scheduler_.state().kv.pool().free_order()) text << block << ' ';
        text << scheduler_.state().kv.pool().num_cached();
        text << ' ' << scheduler_.state().transfers.fenced.size() << (store_.num_asked() > 0);
        return text.str();
    }

  private:
    bool add(std::uint32_t index) {
        if (added_[index]) return false;
        // Two share a prefix, one is long enough to need the whole pool.
        constexpr std::uint32_t kPrompt[] = {5, 5, 9};
        auto spec = spec_of(std::string(1, static_cast<char>('a' + index)), kPrompt[index], 3, index < 2 ? 1 : 2, 2);
        spec.is_session = index == 1 && !has_store_;
        auto outcome = scheduler_.submit(std::move(spec));
        handles_[index] = std::get<RequestHandle>(outcome);
        added_[index] = true;
        return true;
    }
    bool feed() {
        const Request* request = added_[1] ? scheduler_.find(handles_[1]) : nullptr;
        if (request == nullptr || !request->awaits_input || request->turn > 1) return false;
        REQUIRE_FALSE(scheduler_.feed(handles_[1], {{50, 51}, request->stop, 0.0, std::nullopt}).has_value());
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
        let_go(handles_[index]);
        return true;
    }
    /// The first block of a request turns out not to have come.
    bool invalidate(std::uint32_t index) {
        const Request* request = added_[index] ? scheduler_.find(handles_[index]) : nullptr;
        if (request == nullptr || request->kv() == nullptr || request->kv()->table(0).size() == 0) return false;
        const tokenspeed::kv_flat::BlockId block = request->kv()->table(0).ids().front();
        std::vector<RequestHandle> affected;
        for (const Request* reader : scheduler_.invalidate(std::span(&block, 1))) affected.push_back(reader->handle);
        for (const RequestHandle handle : affected) scheduler_.recompute(handle);
        REQUIRE(!scheduler_.state().kv.pool().is_published(block));
        return true;
    }
    void let_go(RequestHandle handle) {
        if (has_store_) {
            scheduler_.let_go(handle, handle == handles_[0]);
        } else {
            scheduler_.release(handle);
        }
    }
    void release(const std::vector<Request*>& requests) {
        std::vector<RequestHandle> handles;
        for (const Request* request : requests) handles.push_back(request->handle);
        for (const RequestHandle handle : handles) let_go(handle);
    }

    bool has_store_;
    Store store_;
    Scheduler scheduler_;
    bool added_[kNumRequests] = {};
    RequestHandle handles_[kNumRequests];
};

std::size_t walk(const std::vector<Move>& moves, bool has_store, int max_depth) {
    std::set<std::string> seen;
    std::vector<std::vector<Move>> frontier = {{}};
    std::size_t num_transitions = 0;
    for (int depth = 0; depth < max_depth; ++depth) {
        std::vector<std::vector<Move>> next;
        for (const auto& path : frontier) {
            for (const Move& move : moves) {
                World world(has_store);
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
    std::printf("walked %zu transitions to depth %d, %zu states\n", num_transitions, max_depth, seen.size());
    return seen.size();
}

std::vector<Move> moves_of(std::initializer_list<Event> alone, std::initializer_list<Event> by_request) {
    std::vector<Move> moves;
    for (const Event event : alone) moves.push_back({event});
    for (std::uint32_t i = 0; i < kNumRequests; ++i) {
        for (const Event event : by_request) moves.push_back({event, i});
    }
    return moves;
}

}  // namespace

TEST_CASE("every order of events keeps every invariant") {
    const auto moves =
        moves_of({Event::kPlan, Event::kAdvance, Event::kRetractAll, Event::kFeed}, {Event::kAdd, Event::kAbort});
    CHECK(walk(moves, false, kDepth) > 1000);
}

TEST_CASE("so does every order of events with loads, failures and sends") {
    const auto moves = moves_of(
        {Event::kPlan, Event::kAdvance, Event::kRetractAll},
        {Event::kAdd, Event::kAbort, Event::kLoadDone, Event::kLoadFailed, Event::kSendDone, Event::kInvalidate});
    CHECK(walk(moves, true, kStoreDepth) > 1000);
}
