// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/step_builder.h"

#include "scheduler_fsm/csrc/victim_choice.h"

namespace tokenspeed::scheduler_fsm {

StepBuilder::StepBuilder(EngineState& engine_state, ExecutionPlan& plan, const StepOptions& step_options)
    : engine(engine_state),
      options(step_options),
      encoders(engine_state, plan),
      token_budget(engine_state.config.max_scheduled_tokens),
      plan_(plan),
      input_rows_(engine_state.config.max_scheduled_tokens) {
    record_.rows.reserve(engine.num_running());
    for (const OrderedRequests* set : {&engine.prefilling, &engine.transfers.loading, &engine.transfers.loaded}) {
        for (const Request* request : set->items()) {
            reservations.set(*request, engine.kv.blocks_to_complete(*request->kv(), request->num_known_tokens()));
        }
    }
}

std::uint32_t StepBuilder::room_for_one() const noexcept {
    const std::uint32_t drafter = engine.config.drafter_slots;
    return input_rows_ > drafter ? std::min(token_budget, input_rows_ - drafter) : 0;
}

std::uint32_t StepBuilder::computable_tokens(const Request& request) const noexcept {
    const SchedulerConfig& config = engine.config;
    const std::uint32_t taken = request.num_computed_tokens + config.num_sampled_tokens;
    const std::uint32_t most = config.max_model_tokens > taken ? config.max_model_tokens - taken : 0;
    return std::min(request.num_pending_tokens(), most);
}

std::uint32_t StepBuilder::free_blocks_for(const Request& request) const noexcept {
    const std::uint32_t free = engine.kv.pool().num_free();
    const std::uint32_t promised = reservations.before(request);
    return free > promised ? free - promised : 0;
}

std::uint32_t StepBuilder::end_tokens(const Request& request, std::uint32_t num_tokens) const noexcept {
    const std::uint32_t end = request.num_computed_tokens + num_tokens + engine.config.lookahead_tokens;
    return std::min(end, engine.config.max_model_tokens);
}

std::uint32_t StepBuilder::missing_blocks(const Request& request, std::uint32_t num_tokens) const noexcept {
    return engine.kv.blocks_to_extend(*request.kv(), end_tokens(request, num_tokens));
}

std::uint32_t StepBuilder::fitting_tokens(const Request& request, std::uint32_t num_tokens) const noexcept {
    const std::uint32_t wanted = end_tokens(request, num_tokens);
    const std::uint32_t end = engine.kv.fitting_tokens(*request.kv(), wanted, free_blocks_for(request));
    if (end == wanted) return num_tokens;
    const std::uint32_t begin = request.num_computed_tokens + engine.config.lookahead_tokens;
    return end > begin ? end - begin : 0;
}

bool StepBuilder::make_room(const Request& request, std::uint32_t num_blocks) {
    for (std::uint32_t free = free_blocks_for(request); free < num_blocks; free = free_blocks_for(request)) {
        // Enough comes back with the steps in flight.
        if (free + engine.transfers.num_fenced_blocks() >= num_blocks) return false;
        Request* victim = engine.idle.empty() ? choose_victim(engine, request, num_blocks - free) : engine.idle.front();
        if (victim == nullptr) return false;
        retract(*victim);
    }
    return true;
}

void StepBuilder::retract(Request& request) {
    reservations.set(request, 0);
    engine.retract(request);
    plan_.retracted.push_back(&request);
}

void StepBuilder::end_if_pool_is_its_own(Request& request) {
    // With steps in flight their tokens are still to be delivered; with other owners blocks may yet come back.
    const bool alone = engine.num_running() == 1 && engine.kv.pool().num_in_use() == request.kv()->num_held_blocks();
    if (!alone || request.num_in_flight_tokens > 0) return;
    reservations.set(request, 0);
    engine.finish(request, FinishReason::kLength);
    plan_.ended.push_back(&request);
}

PlanRow StepBuilder::make_row(Request& request, std::uint32_t num_tokens) const noexcept {
    const std::uint32_t end = request.num_computed_tokens + num_tokens;
    const std::uint32_t last = request.num_known_tokens() + request.num_placeholders;
    PlanRow row;
    row.request = &request;
    row.handle = request.handle;
    if (request.table_is_new) row.kind = request.announced ? RowKind::kResumed : RowKind::kFirst;
    row.samples = end >= last;
    row.needs_history = row.kind == RowKind::kResumed || request.last_planned_step + 1 != engine.step;
    row.num_tokens = num_tokens;
    row.num_computed_tokens = request.num_computed_tokens;
    row.num_output_tokens = request.num_output_tokens();
    row.num_placeholders = request.num_placeholders;
    row.num_drafts = end > last ? end - last : 0;
    if (request.table_is_new) {
        row.num_cached_tokens = request.num_cached_tokens;
        row.num_loaded_tokens = request.load.num_tokens();
        row.num_warm_tokens = std::max(request.num_cached_tokens, request.load.warm_tokens);
    }
    return row;
}

bool StepBuilder::append_news(Request& request) {
    kv_flat::KvSequence& sequence = *request.kv();
    if (!sequence.take_growth()) {
        plan_.first_new_blocks.resize(plan_.first_new_blocks.size() + sequence.num_groups());
        return false;
    }
    bool has_news = false;
    for (kv_flat::GroupId group = 0; group < sequence.num_groups(); ++group) {
        const std::uint32_t first = sequence.take_news(group);
        plan_.first_new_blocks.push_back(first);
        has_news = has_news || first < sequence.table(group).size();
    }
    return has_news;
}

std::uint32_t StepBuilder::last_checkpoint(const Request& request) const noexcept {
    const std::uint32_t unit = engine.kv.config().key_tokens;
    return (request.num_known_tokens() - 1) / unit * unit;
}

std::uint32_t StepBuilder::chunk_tokens(const Request& request, std::uint32_t num_tokens) const noexcept {
    const std::uint32_t block_tokens = engine.kv.state_block_tokens();
    if (block_tokens == 0 || !engine.kv.config().prefix_caching || !engine.config.chunked_prefill) return num_tokens;
    const std::uint32_t begin = request.num_computed_tokens;
    std::uint32_t end = begin + num_tokens;
    // The end of a block costs no copy.
    if (end < request.num_known_tokens() && end / block_tokens * block_tokens > begin) end -= end % block_tokens;
    for (const std::uint32_t stop : {request.junction_tokens, last_checkpoint(request)}) {
        if (begin < stop && stop < end) end = stop;
    }
    return end - begin;
}

void StepBuilder::keep_states(Request& request, std::uint32_t num_tokens) {
    if (!request.kv()->has_checkpoint()) return;
    const std::uint32_t kept = missing_blocks(request, num_tokens) + reservations.total();
    const std::uint32_t free = engine.kv.pool().num_free();
    const std::uint32_t spare = free > kept ? free - kept : 0;
    engine.counters.num_lost_checkpoints += engine.kv.keep_states(*request.kv(), request.chain, request.tokens.all(),
                                                                  request.num_computed_tokens + num_tokens, spare);
}

void StepBuilder::add_row(Request& request, std::uint32_t num_tokens) {
    const bool has_states = engine.kv.state_block_tokens() > 0;
    if (has_states) keep_states(request, num_tokens);
    static_cast<void>(engine.kv.extend(*request.kv(), end_tokens(request, num_tokens)));
    PlanRow row = make_row(request, num_tokens);
    row.has_new_blocks = append_news(request);
    plan_.rows.push_back(row);
    record_.rows.push_back(
        {row.handle, request.incarnation, request.turn, row.num_tokens, row.num_drafts, row.samples});
    plan_.num_tokens += num_tokens;
    plan_.has_new_tables = plan_.has_new_tables || row.kind != RowKind::kRunning;
    plan_.drafts.insert(plan_.drafts.end(), request.drafts.begin(), request.drafts.begin() + row.num_drafts);
    if (request.table_is_new || has_states) engine.plan_copies(*request.kv(), plan_);
    token_budget -= num_tokens;
    input_rows_ -= std::min(input_rows_, num_tokens + engine.config.drafter_slots);

    request.announced = true;
    request.table_is_new = false;
    request.drafts.clear();
    request.num_computed_tokens += num_tokens;
    request.num_in_flight_tokens += num_tokens;
    request.last_planned_step = engine.step;
    // Workers run steps in order and write a layer's KV before they read it: a later row may already share these
    // blocks.
    const std::uint32_t num_final = std::min(request.num_computed_tokens, request.num_known_tokens());
    if (has_states) {
        const std::uint32_t end = request.num_computed_tokens;
        engine.kv.note_states(*request.kv(), end, end == request.junction_tokens || end == last_checkpoint(request));
    }
    if (engine.kv.completes_keys(*request.kv(), num_final))
        engine.kv.publish(*request.kv(), request.chain, request.tokens.all(), num_final);
    if (!row.samples) return;

    request.eligible_step = engine.step + engine.config.decode_stagger_steps;
    if (engine.config.async_scheduling) {
        request.num_placeholders += engine.config.num_sampled_tokens + row.num_drafts;
    }
    if (request.is_prefilling()) {
        reservations.set(request, 0);
        engine.start_decoding(request);
    }
}

bool StepBuilder::can_use_drafts(const PlanRow& row) const noexcept {
    // Not after a chunk of a prompt, and not when this step, or one already in flight, surely samples the last token.
    const std::uint32_t num_sure = row.request->num_output_tokens() + 1 + (row.num_placeholders > 0 ? 1 : 0);
    return row.samples && num_sure < row.request->stop.max_tokens;
}

void StepBuilder::plan_drafts() {
    const auto& by_batch = engine.config.draft_tokens_by_batch;
    plan_.num_next_drafts = engine.config.num_draft_tokens;
    if (!by_batch.empty()) plan_.num_next_drafts = by_batch[std::min(plan_.rows.size(), by_batch.size() - 1)];
    plan_.drafts_are_unused =
        std::ranges::none_of(plan_.rows, [this](const PlanRow& row) { return can_use_drafts(row); });
    if (!engine.config.async_scheduling) return;
    for (const PlanRow& row : plan_.rows) {
        if (row.samples && row.request->is_running()) row.request->drafts.assign(plan_.num_next_drafts, -1);
    }
}

void StepBuilder::close() {
    encoders.close();
    engine.kept_tokens = lacking_tokens;
    if (plan_.rows.empty()) return;
    ++engine.num_full_steps;
    if (engine.config.num_draft_tokens > 0) plan_drafts();
    record_.step = plan_.step;
    engine.in_flight.push_back(std::move(record_));
}

}  // namespace tokenspeed::scheduler_fsm
