// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/admission.h"

#include <algorithm>

namespace tokenspeed::scheduler_fsm {
namespace {

// A request that does not fit is overtaken in at most this many steps; then nothing behind it starts until it does.
constexpr std::uint32_t kMaxOvertakenSteps = 64;

// Others may adopt the idle part of a waiting request's prefix, so that it needs less than remembered: looked at again
// this often.
constexpr std::uint64_t kRecheckSteps = 16;

// A step looks at no more than this many requests that do not fit, however long the queue.
constexpr std::size_t kMaxPassedOver = 16;

// Nor at more than this many that wait for a prefix which another computes.
constexpr std::uint32_t kMaxFollowers = 256;

/// Blocks that become free for others when `request` goes: its own alone, and not part of what `match` counts as there
/// already.
std::uint32_t num_gained_blocks(const Request& request, const kv_flat::BlockPool& pool, const kv_flat::Match& match) {
    std::uint32_t sum = 0;
    for (kv_flat::GroupId group = 0; group < request.kv()->num_groups(); ++group) {
        const auto& matched = match.blocks[group];
        const auto held = request.kv()->table(group).ids();
        for (std::size_t i = 0; i < held.size(); ++i) {
            // A key names its whole prefix, so a matched block stands in the same column of every table.
            const bool is_matched = i < matched.size() && matched[i] == held[i];
            sum += held[i] != kv_flat::kNullBlock && pool.num_owners(held[i]) == 1 && !is_matched;
        }
    }
    return sum;
}

}  // namespace

bool Admission::has_slot() const {
    const SchedulerConfig& config = step_.engine.config;
    const std::uint32_t most = config.max_num_active_seqs > 0 ? config.max_num_active_seqs : config.max_num_seqs;
    return step_.engine.has_slot() && step_.engine.num_running() < most;
}

bool Admission::is_open() const {
    return step_.options.pause == PauseLevel::kNone && !closed_for_all_ && passed_over_.size() < kMaxPassedOver &&
           num_followers_ < kMaxFollowers && has_slot();
}

kv_flat::Match Admission::probe(const Request& request, kv_flat::MatchEnd end) {
    const kv_flat::FlatKv& kv = step_.engine.kv;
    ++step_.engine.counters.num_cache_lookups;
    // The last known token is always computed: its logits are what the step is for.
    const std::uint32_t most = request.num_known_tokens() - 1;
    if (!request.may_read_cache) return kv.no_match();
    // Connectors load whole blocks, from the end of the match on.
    if (step_.engine.transfers.store != nullptr) end = kv_flat::MatchEnd::kPhysicalBlock;
    return kv.probe(request.chain.keys(), most, step_.engine.config.drop_last_match_block, end);
}

std::uint32_t Admission::blocks_needed(const Request& request, const kv_flat::Match& match) const {
    const EngineState& engine = step_.engine;
    const std::uint32_t first_chunk = std::min(request.num_known_tokens(), match.num_tokens + step_.token_budget);
    std::uint32_t reserve = engine.config.reserve_full_sequence ? request.num_known_tokens() : first_chunk;
    // The source of a copy comes back only after a first row, so that row must fit beside it, whatever a drafter adds.
    if (match.num_copied_idle_blocks > 0) reserve += engine.config.lookahead_tokens;
    return engine.kv.blocks_to_open(match, reserve);
}

std::uint32_t Admission::free_block_limit(const Request& request) const {
    const EngineState& engine = step_.engine;
    std::uint32_t kept = step_.reservations.total();
    if (engine.num_running() > 0) {
        kept += static_cast<std::uint32_t>(engine.config.watermark * engine.kv.pool().num_usable());
        // A request that was retracted once comes back only with room for every decode to grow by a block, or it goes
        // again at once.
        if (request.was_retracted()) kept += engine.decoding.size();
    }
    const std::uint32_t free = engine.kv.pool().num_free();
    return free > kept ? free - kept : 0;
}

bool Admission::may_try(const Request& request) const {
    const std::uint64_t step = step_.engine.step;
    if (request.retracted_step == step || request.passed_over_step == step) return false;
    return !closed_for_new_ || request.was_retracted();
}

bool Admission::answer_may_differ(const Request& request, std::uint32_t limit) const {
    const CapacityMemo& memo = request.memo;
    if (memo.needed_blocks <= limit) return true;
    if (memo.least_blocks <= limit && step_.engine.step % kRecheckSteps == 0) return true;
    return memo.has_missing_key &&
           step_.engine.kv.pool().find(memo.missing_key, memo.missing_group) != kv_flat::kNullBlock;
}

void Admission::remember_failure(Request& request, std::uint32_t num_cached_tokens, std::uint32_t needed_blocks,
                                 std::uint32_t num_idle_blocks) {
    request.memo = {};
    request.memo.needed_blocks = needed_blocks;
    request.memo.least_blocks = needed_blocks - std::min(needed_blocks, num_idle_blocks);
    if (request.chain.key_tokens() == 0) return;
    const auto& groups = step_.engine.kv.config().groups;
    const auto keys = request.chain.keys();
    for (kv_flat::GroupId group = 0; group < groups.size(); ++group) {
        if (groups[group].retention != kv_flat::Retention::kFull) continue;
        const std::size_t next = num_cached_tokens / request.chain.key_tokens();
        if (next >= keys.size()) return;
        request.memo.has_missing_key = true;
        request.memo.missing_key = keys[next];
        request.memo.missing_group = group;
        return;
    }
}

bool Admission::try_start(Request& request) {
    EngineState& engine = step_.engine;
    if (!may_try(request)) return false;
    if (leaders_.is_awaited(request)) {
        ++num_followers_;
        return false;
    }
    if (!pace_.admits(request)) {
        if (pace_.refuses(request)) {
            engine.finish(request, FinishReason::kError);
            plan_.refused.push_back(&request);
            return false;
        }
        closed_for_all_ = true;  // one that needs less does not overtake: who waits is served in the total order
        return false;
    }
    if (!idle_.free_adapter(request.adapter)) {
        pass_over(request);
        return false;
    }
    if (engine.kv.least_held_blocks(request.num_known_tokens()) > engine.kv.pool().num_usable()) {
        // It grew past the pool while it decoded; alone in the pool it could get no further either.
        engine.finish(request, FinishReason::kLength);
        plan_.ended.push_back(&request);
        return false;
    }
    if (start_if_it_fits(request)) return request.is_prefilling();
    pass_over(request);
    return false;
}

bool Admission::start_if_it_fits(Request& request) {
    EngineState& engine = step_.engine;
    std::uint32_t limit = free_block_limit(request);
    // With the pool to itself it starts in any case: its chunks shrink to what fits.
    const auto is_alone = [&] { return engine.num_running() == 0 && engine.kv.pool().num_in_use() == 0; };
    const std::uint32_t most = limit + idle_.num_blocks();
    const bool may_be_alone = engine.num_running() == 0 && (is_alone() || !engine.idle.empty());
    if (!may_be_alone && !answer_may_differ(request, most)) return false;
    while (true) {
        kv_flat::Match match = probe(request);
        std::uint32_t needed = blocks_needed(request, match);
        const std::uint32_t num_cached_tokens = match.num_tokens;
        const std::uint32_t num_attention_tokens = match.num_attention_tokens;
        if (needed > limit && match.num_copied_idle_blocks > 0) {
            // A copy keeps its source from others for a step. A match that only shares is shorter, but needs less.
            match = probe(request, kv_flat::MatchEnd::kPhysicalBlock);
            needed = blocks_needed(request, match);
        }
        if (needed <= limit || is_alone()) {
            if (leaders_.follow(request, num_attention_tokens)) {
                ++num_followers_;
                return true;
            }
            if (request.encoder && !can_encode(request, match.num_tokens)) return false;
            const ExternalKv::Offer offer = ask_store(request, match, needed <= limit);
            if (offer.is_undecided) {
                Transfers(engine).put_aside(request);
                return true;
            }
            idle_.free_slot();
            engine.counters.num_coarsened_tokens += num_cached_tokens - match.num_tokens;
            engine.counters.num_stateless_tokens += num_attention_tokens - num_cached_tokens;
            match.num_attention_tokens = num_attention_tokens;
            start(request, match, offer);
            return true;
        }
        if ((needed > most && !may_be_alone) || !idle_.retract_one()) {
            remember_failure(request, num_attention_tokens, needed, match.num_idle_blocks);
            return false;
        }
        limit = free_block_limit(request);
    }
}

bool Admission::can_encode(const Request& request, std::uint32_t num_computed_tokens) {
    // What a store may load is not known before it is asked.
    if (step_.engine.transfers.store != nullptr) return true;
    const std::uint32_t least = step_.encoders.least_tokens(request, num_computed_tokens);
    if (least <= step_.room_for_one()) return step_.encoders.fitting_tokens(request, num_computed_tokens, least) > 0;
    step_.lacking_tokens = std::max(step_.lacking_tokens, least);
    return false;
}

void Admission::pass_over(Request& request) {
    if (request.passed_over_step == step_.engine.step) return;
    request.passed_over_step = step_.engine.step;
    passed_over_.push_back(&request);
    // Its cached blocks are what a retracted request has left: nobody new may take them.
    closed_for_new_ = closed_for_new_ || request.was_retracted();
    closed_for_all_ = closed_for_all_ || request.num_overtaken_steps >= kMaxOvertakenSteps;
}

ExternalKv::Offer Admission::ask_store(const Request& request, const kv_flat::Match& match, bool fits) const {
    const EngineState& engine = step_.engine;
    if (engine.transfers.store == nullptr) return {};
    // Asked also where the answer is not used: connectors begin their books of an admission with it.
    ExternalKv::Offer offer = engine.transfers.store->ask(request, match.num_tokens);
    if (!request.may_read_cache) return {};
    if (offer.is_undecided || offer.num_tokens == 0) return offer;
    const std::uint32_t end = match.num_tokens + offer.num_tokens;
    const std::uint32_t num_computed = std::min(end, request.num_known_tokens() - 1);
    const bool has_room = engine.kv.blocks_to_load(match, end, num_computed) <= engine.kv.pool().num_free();
    const bool is_possible = end <= request.num_known_tokens() && has_room;
    return fits && is_possible && !request.load.barred ? offer : ExternalKv::Offer{};
}

void Admission::start(Request& request, const kv_flat::Match& match, const ExternalKv::Offer& offer) {
    EngineState& engine = step_.engine;
    count_cache_use(request, match, offer.num_tokens);
    const std::uint32_t end = match.num_tokens + offer.num_tokens;
    request.num_computed_tokens = std::min(end, request.num_known_tokens() - 1);
    request.num_cached_tokens = match.num_tokens;
    request.junction_tokens = match.num_attention_tokens > match.num_tokens ? match.num_attention_tokens : 0;
    request.load = {};
    request.load.begin_tokens = match.num_tokens;
    request.load.end_tokens = request.load.valid_tokens = end;
    kv_flat::KvSequence sequence = engine.kv.open(match, request.hints.session);
    if (offer.num_tokens > 0) engine.kv.extend_loaded(sequence, end, request.num_computed_tokens);
    if (offer.is_async && offer.num_tokens > 0) {
        Transfers(engine).prefetch(request, std::move(sequence));
        plan_.prefetching.push_back(&request);
    } else {
        engine.admit(request, std::move(sequence));
        plan_.has_sync_loads = plan_.has_sync_loads || offer.num_tokens > 0;
    }
    if (engine.transfers.store != nullptr) engine.transfers.store->accept(request, offer.num_tokens);
    step_.reservations.set(request, engine.kv.blocks_to_complete(*request.kv(), request.num_known_tokens()));
    num_started_after_first_pass_over_ += !passed_over_.empty();
}

bool Admission::make_slot(const Request& request) {
    if (has_slot()) return true;
    if (step_.engine.config.policy != QueuePolicy::kPriority) return false;
    Request* last = nullptr;
    for (const OrderedRequests* set : {&step_.engine.decoding, &step_.engine.prefilling}) {
        if (set->empty() || step_.is_planned(*set->items().back())) continue;
        if (last == nullptr || last->order < set->items().back()->order) last = set->items().back();
    }
    if (last == nullptr || last->order.priority <= request.order.priority) return false;
    step_.retract(*last);
    return has_slot();
}

void Admission::start_loaded() {
    EngineState& engine = step_.engine;
    const auto items = engine.transfers.loaded.items();
    const std::vector<Request*> waiting(items.begin(), items.end());
    std::uint32_t room = step_.room_for_one();
    for (Request* request : waiting) {
        const std::uint32_t wanted = step_.computable_tokens(*request);
        if (!engine.config.chunked_prefill && wanted > room) continue;
        if (!engine.adapters.admits(request->adapter) || !make_slot(*request)) continue;
        room -= std::min(room, wanted);
        Transfers(engine).start_loaded(*request);
        engine.transfers.store->accept(*request, 0);
    }
}

void Admission::close() {
    if (num_started_after_first_pass_over_ == 0) return;
    for (Request* request : passed_over_) ++request->num_overtaken_steps;
}

void Admission::displace() {
    EngineState& engine = step_.engine;
    if (engine.config.policy != QueuePolicy::kPriority || engine.waiting.empty()) return;
    if (step_.options.pause != PauseLevel::kNone) return;
    const Request& urgent = engine.waiting.front();
    if (!may_try(urgent) || !engine.adapters.admits(urgent.adapter) || leaders_.is_awaited(urgent)) return;

    std::vector<Request*> less_urgent;
    for (const OrderedRequests* set : {&engine.decoding, &engine.prefilling}) {
        for (Request* request : set->items()) {
            if (request->order.priority > urgent.order.priority) less_urgent.push_back(request);
        }
    }
    if (less_urgent.empty()) return;
    std::ranges::sort(less_urgent, [](const Request* a, const Request* b) { return b->order < a->order; });

    bool slot = has_slot();
    std::uint32_t limit = free_block_limit(urgent) + engine.transfers.num_fenced_blocks();
    less_urgent.insert(less_urgent.begin(), engine.idle.begin(), engine.idle.end());
    if (slot && !answer_may_differ(urgent, limit + engine.kv.pool().num_in_use())) return;
    const kv_flat::Match match = probe(urgent);
    const std::uint32_t needed = engine.kv.blocks_to_open(match, urgent.num_known_tokens());
    std::vector<Request*> victims;
    for (Request* request : less_urgent) {
        if (slot && needed <= limit) break;
        // An idle session does not run: it makes room in memory only.
        if (request->is_idle() && needed <= limit) continue;
        victims.push_back(request);
        slot = slot || !request->is_idle();
        limit += num_gained_blocks(*request, engine.kv.pool(), match);
    }
    if (!slot || needed > limit) return;
    for (Request* victim : victims) step_.retract(*victim);
}

}  // namespace tokenspeed::scheduler_fsm
