// SPDX-License-Identifier: Apache-2.0
#pragma once

// Events under settings that dice decide; the modelled workers see every wrong KV read and every token lost or doubled.
// Seeds throw the dice in random_seeds_test, bytes in the fuzzer.
#include <deque>

#include "tests/cpp/scheduler_fsm/event_replica.h"
#include "tests/cpp/scheduler_fsm/random_setting.h"

namespace tokenspeed::scheduler_fsm::testing {

/// A scheduler, its clients and its workers. Throws BrokenInvariant or std::logic_error where something is wrong.
class World {
  public:
    explicit World(Dice dice)
        : dice_(std::move(dice)),
          setting_(random_setting(dice_)),
          scheduler_(setting_.config),
          memory_(setting_.config.kv) {}

    void run() {
        for (int i = 0; i < kNumEvents && !dice_.is_exhausted(); ++i) {
            happen();
            check();
        }
        for (Client& client : clients_) open_gate(client);
        for (int i = 0; num_open() > 0; ++i) {
            require(i < kMaxDrainSteps, "requests stay open");
            while (results_.size() >= setting_.depth || (!results_.empty() && dice_.one_in(3))) advance();
            plan({});
            check();
        }
        while (!results_.empty()) advance();
        require(scheduler_.reset_prefix_cache());
        require(scheduler_.state().kv.pool().num_free() == scheduler_.state().kv.pool().num_usable());
        require(scheduler_.state().num_parked == 0);
    }

    [[nodiscard]] std::uint32_t num_finished() const noexcept { return num_finished_; }
    [[nodiscard]] std::uint64_t num_copies() const noexcept { return scheduler_.state().counters.num_block_copies; }
    [[nodiscard]] std::uint64_t num_hit_tokens() const noexcept {
        return scheduler_.state().counters.num_cache_hit_tokens;
    }
    [[nodiscard]] bool has_states() const noexcept { return scheduler_.state().kv.state_block_tokens() > 0; }

  private:
    void check() {
        scheduler_.check_integrity();
        if (setting_.config.kv.record_events) replica_.follow(scheduler_.kv().pool());
    }

    void happen() {
        const std::uint32_t what = dice_.below(100);
        if (what < 12) {
            if (num_open() < 12) submit();
        } else if (what < 55) {
            if (results_.size() < setting_.depth) plan({PauseLevel::kNone, dice_.one_in(5)});
        } else if (what < 90) {
            if (!results_.empty()) advance();
        } else if (what < 93) {
            if (Client* client = any_open()) abort(*client);
        } else if (what < 96) {
            if (Client* client = any_open()) open_gate(*client);
        } else if (what < 97) {
            scheduler_.retract_all();
            static_cast<void>(scheduler_.take_outside_retractions());
            require(scheduler_.reset_prefix_cache());
        } else if (what < 98) {
            scheduler_.retract_all();
            static_cast<void>(scheduler_.take_outside_retractions());
        } else if (what < 99) {
            static_cast<void>(scheduler_.reset_prefix_cache());
        } else if (results_.size() < setting_.depth) {
            plan({dice_.one_in(2) ? PauseLevel::kNew : PauseLevel::kAll, false});
        }
    }

    void submit() {
        const SchedulerConfig& config = setting_.config;
        Client client;
        const auto num_prompt = dice_.between(1, dice_.one_in(4) ? config.max_model_tokens : 16);
        const auto num_common = dice_.between(0, num_prompt);
        for (std::uint32_t i = 0; i < num_prompt; ++i) {
            client.prompt.push_back(i < num_common ? static_cast<TokenId>(i % 5)
                                                   : static_cast<TokenId>(dice_.below(kVocabulary)));
        }
        RequestSpec spec;
        spec.label = std::string("r").append(std::to_string(clients_.size()));
        spec.prompt.tokens = client.prompt;
        spec.prompt.chain = kv_flat::KeyChain(config.kv.prefix_caching ? config.kv.key_tokens : 0, {});
        spec.prompt.chain.extend(client.prompt);
        client.stop.max_tokens = dice_.between(1, 20);
        if (dice_.one_in(2)) client.stop.eos_token = kEos;
        spec.stop = client.stop;
        spec.priority = static_cast<std::int32_t>(dice_.below(3));
        spec.arrival_time_s = static_cast<double>(clients_.size());
        spec.adapter = static_cast<std::int32_t>(dice_.below(3));
        spec.may_read_cache = !dice_.one_in(8);
        spec.ready = !dice_.one_in(8);
        client.gated = !spec.ready;
        auto outcome = scheduler_.submit(std::move(spec));
        if (std::holds_alternative<Refusal>(outcome)) return;
        client.handle = std::get<RequestHandle>(outcome);
        clients_.push_back(std::move(client));
    }

    void abort(Client& client) {
        require(scheduler_.finish(client.handle, FinishReason::kAbort));
        scheduler_.release(client.handle);
        client.is_done = true;
    }

    void open_gate(Client& client) {
        if (!client.is_done) scheduler_.open_gate(client.handle);
    }

    void plan(const StepOptions& options) {
        const Request* first = first_running(scheduler_.state());
        const ExecutionPlan& plan = scheduler_.plan(options);
        check_budget(plan);
        if (std::ranges::count(plan.retracted, first) > 0) check_displaced(*first, scheduler_.state(), plan);
        for (const Request* request : plan.retracted) {
            for (const PlanRow& row : plan.rows) require(row.request != request);
        }
        if (!plan.rows.empty()) execute(plan);
        std::vector<RequestHandle> ended;
        for (const Request* request : plan.ended) {
            Client& client = client_of(*request);
            check_output(client, *request);
            check_pool_was_too_small(*request);
            client.is_done = true;
            ended.push_back(request->handle);
        }
        for (const RequestHandle handle : ended) scheduler_.release(handle);
    }

    void check_budget(const ExecutionPlan& plan) const {
        std::uint32_t num_tokens = 0;
        for (const PlanRow& row : plan.rows) {
            require(row.num_tokens > 0);
            require(row.request->is_running());
            num_tokens += row.num_tokens;
        }
        require(num_tokens == plan.num_tokens);
        const auto num_drafter = static_cast<std::uint32_t>(plan.rows.size()) * setting_.config.drafter_slots;
        require(num_tokens + num_drafter <= setting_.config.max_scheduled_tokens);
        require(plan.rows.size() <= setting_.config.max_num_seqs);
    }

    /// Ending a request for lack of memory is right only when one more token of it does not fit into the whole pool.
    void check_pool_was_too_small(const Request& request) const {
        const kv_flat::FlatKv& kv = scheduler_.state().kv;
        const std::uint32_t most = request.num_known_tokens() + 1 + setting_.config.lookahead_tokens;
        require(kv.max_held_blocks(most) > kv.pool().num_usable());
    }

    void execute(const ExecutionPlan& plan) {
        std::vector<Run> runs;
        std::size_t next_draft = 0;
        for (std::size_t i = 0; i < plan.rows.size(); ++i) {
            const PlanRow& row = plan.rows[i];
            Client& client = client_of(*row.request);
            update_resident(client.resident, row, plan, i);
            const auto drafts = std::span(plan.drafts).subspan(next_draft, row.num_drafts);
            next_draft += row.num_drafts;
            runs.push_back(run_of(client, row, drafts));
        }
        require(next_draft == plan.drafts.size());
        for (const PlannedCopy& ends : plan.copies) memory_.copy(ends);
        for (const Run& run : runs) memory_.move_states(run);
        for (const Run& run : runs) memory_.write(run);
        for (const Run& run : runs) memory_.advance_states(run);
        for (const Run& run : runs) memory_.check_reads(run);
        Result result{plan.step, {}, {0}};
        for (const Run& run : runs) {
            if (run.samples)
                sample(run, result.tokens);
            else
                run.client->resident.num_computed = static_cast<std::uint32_t>(run.ids.size());
            run.client->resident.num_proposed = run.samples && !plan.drafts_are_unused ? plan.num_next_drafts : 0;
            result.offsets.push_back(static_cast<std::uint32_t>(result.tokens.size()));
        }
        results_.push_back(std::move(result));
    }

    void update_resident(Resident& resident, const PlanRow& row, const ExecutionPlan& plan, std::size_t index) {
        const Request& request = *row.request;
        const auto num_groups = setting_.config.kv.groups.size();
        if (row.kind != RowKind::kRunning) {
            require(row.num_placeholders == 0);
            const auto tokens = request.tokens.all();
            if (row.kind == RowKind::kResumed) require(std::ranges::equal(resident.tokens, tokens));
            resident = {};
            resident.tokens.assign(tokens.begin(), tokens.end());
            resident.num_computed = row.num_computed_tokens;
            resident.table.resize(num_groups);
        }
        for (kv_flat::GroupId group = 0; group < num_groups; ++group) {
            const auto ids = request.kv()->table(group).ids();
            const auto first = row.has_new_blocks ? plan.first_new_blocks[index * num_groups + group] : ids.size();
            require(resident.table[group].size() == first);
            resident.table[group].insert(resident.table[group].end(), ids.begin() + static_cast<std::ptrdiff_t>(first),
                                         ids.end());
        }
    }

    Run run_of(Client& client, const PlanRow& row, std::span<const TokenId> drafts) {
        const Resident& resident = client.resident;
        Run run{&client, {}, resident.num_computed, row.num_drafts, row.samples};
        // The plan may count drafts that the workers have rejected since.
        require(row.num_computed_tokens >= resident.num_computed);
        if (setting_.config.num_draft_tokens == 0) require(row.num_computed_tokens == resident.num_computed);
        const std::uint32_t end = resident.num_computed + row.num_tokens - row.num_drafts;
        require(end <= resident.tokens.size());
        require(row.samples == (end == resident.tokens.size()));
        run.ids.assign(resident.tokens.begin(), resident.tokens.begin() + end);
        if (setting_.config.async_scheduling) require(row.num_drafts <= resident.num_proposed);
        for (TokenId draft : drafts) {
            if (draft < 0) draft = propose(run.ids);
            run.ids.push_back(draft);
        }
        require(run.ids.size() <= setting_.config.max_model_tokens);
        return run;
    }

    TokenId propose(std::span<const TokenId> ids) {
        return dice_.one_in(3) ? static_cast<TokenId>(dice_.below(kVocabulary)) : next_token(ids);
    }

    void sample(const Run& run, std::vector<TokenId>& sampled) {
        Resident& resident = run.client->resident;
        resident.num_computed = static_cast<std::uint32_t>(resident.tokens.size());
        for (std::uint32_t i = 0; i <= run.num_drafts; ++i) {
            const TokenId token = next_token(resident.tokens);
            resident.tokens.push_back(token);
            sampled.push_back(token);
            if (i == run.num_drafts || run.ids[resident.tokens.size() - 1] != token) break;
            ++resident.num_computed;
        }
    }

    void advance() {
        const Result result = std::move(results_.front());
        results_.pop_front();
        std::vector<RequestHandle> finished;
        std::vector<RequestHandle> sampled;
        for (const Delivery& delivery : scheduler_.advance({result.step, result.tokens, result.offsets})) {
            Client& client = client_of(*delivery.request);
            check_output(client, *delivery.request);
            if (!delivery.finished) {
                sampled.push_back(client.handle);
                continue;
            }
            require(delivery.request->num_output_tokens() == expected_output(client).size());
            client.is_done = true;
            ++num_finished_;
            finished.push_back(client.handle);
        }
        for (const RequestHandle handle : finished) scheduler_.release(handle);
        if (dice_.one_in(16)) {
            require(scheduler_.advance({result.step, result.tokens, result.offsets}).empty(), "a result counts twice");
        }
        if (setting_.config.num_draft_tokens > 0 && !setting_.config.async_scheduling) {
            for (const RequestHandle handle : sampled) draft(handle);
        }
        scheduler_.check_integrity();
    }

    void draft(RequestHandle handle) {
        const Request& request = *scheduler_.find(handle);
        std::vector<TokenId> ids(request.tokens.all().begin(), request.tokens.all().end());
        std::vector<TokenId> drafts;
        for (std::uint32_t i = dice_.below(setting_.config.num_draft_tokens + 1); i > 0; --i) {
            drafts.push_back(propose(ids));
            ids.push_back(drafts.back());
        }
        scheduler_.set_drafts(handle, drafts);
    }

    /// All output of an undisturbed run.
    [[nodiscard]] std::vector<TokenId> expected_output(const Client& client) const {
        std::vector<TokenId> ids = client.prompt;
        while (ids.size() < setting_.config.max_model_tokens &&
               ids.size() < client.prompt.size() + client.stop.max_tokens) {
            ids.push_back(next_token(ids));
            if (client.stop.eos_token == ids.back()) break;
        }
        return {ids.begin() + static_cast<std::ptrdiff_t>(client.prompt.size()), ids.end()};
    }

    void check_output(const Client& client, const Request& request) const {
        const auto expected = expected_output(client);
        const auto output = request.output();
        require(output.size() <= expected.size());
        require(std::ranges::equal(output, std::span(expected).first(output.size())));
    }

    Client& client_of(const Request& request) {
        const auto found = std::ranges::find_if(
            clients_, [&](const Client& client) { return !client.is_done && client.handle == request.handle; });
        require(found != clients_.end());
        return *found;
    }

    [[nodiscard]] std::size_t num_open() const {
        return static_cast<std::size_t>(std::ranges::count(clients_, false, &Client::is_done));
    }

    Client* any_open() {
        std::vector<Client*> open;
        for (Client& client : clients_) {
            if (!client.is_done) open.push_back(&client);
        }
        return open.empty() ? nullptr : open[dice_.below(static_cast<std::uint32_t>(open.size()))];
    }

    Dice dice_;
    Setting setting_;
    Scheduler scheduler_;
    KvMemory memory_;
    EventReplica replica_;
    std::deque<Client> clients_;
    std::deque<Result> results_;
    std::uint32_t num_finished_ = 0;
};

}  // namespace tokenspeed::scheduler_fsm::testing
