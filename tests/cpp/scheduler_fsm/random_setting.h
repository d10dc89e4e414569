// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a World draws from and remembers: settings, clients, and the KV memory of the modelled workers.
#include <source_location>
#include <stdexcept>
#include <string_view>

#include "tests/cpp/scheduler_fsm/dice.h"
#include "tests/cpp/scheduler_fsm/fixture.h"

namespace tokenspeed::scheduler_fsm::testing {

constexpr TokenId kVocabulary = 7;
constexpr TokenId kEos = 6;
constexpr int kNumEvents = 400;
constexpr int kMaxDrainSteps = 6000;

inline std::uint64_t mix(std::uint64_t state, std::uint64_t value) noexcept {
    state = (state ^ value) * 0x9E3779B97F4A7C15ULL;
    return state ^ (state >> 29U);
}

/// Names a token and everything before it: what a KV slot holds.
inline std::vector<std::uint64_t> prefix_names(std::span<const TokenId> tokens) {
    std::vector<std::uint64_t> names;
    std::uint64_t state = 1;
    for (const TokenId token : tokens) names.push_back(state = mix(state, static_cast<std::uint64_t>(token) + 1));
    return names;
}

/// The model: the next token follows from all tokens before it.
inline TokenId next_token(std::span<const TokenId> tokens) {
    return static_cast<TokenId>(mix(prefix_names(tokens).back(), 77) % kVocabulary);
}

/// Something is wrong; the message says where it was noticed.
struct BrokenInvariant : std::logic_error {
    using std::logic_error::logic_error;
};

inline void require(bool holds, std::string_view what = "does not hold",
                    std::source_location where = std::source_location::current()) {
    if (holds) return;
    throw BrokenInvariant(std::string(where.file_name()) + ":" + std::to_string(where.line()) + ": " +
                          std::string(what));
}

struct Setting {
    SchedulerConfig config;
    std::uint32_t depth = 1;  ///< steps in flight
};

inline void add_speculation(Dice& dice, Setting& setting) {
    SchedulerConfig& config = setting.config;
    config.num_draft_tokens = dice.between(1, 3);
    config.lookahead_tokens = dice.one_in(2) ? config.num_draft_tokens : 0;
    config.drafter_slots = dice.one_in(3) ? 1 : 0;
    config.drop_last_match_block = dice.one_in(2);
    config.max_scheduled_tokens += config.drafter_slots;
    if (!config.async_scheduling) setting.depth = 1;
    if (setting.depth > 2) setting.depth = 2;  // vLLM speculates with at most two steps in flight
    if (!dice.one_in(3)) return;
    for (std::uint32_t i = 0; i <= config.max_num_seqs; ++i) {
        config.draft_tokens_by_batch.push_back(dice.between(0, config.num_draft_tokens));
    }
}

inline Setting random_setting(Dice& dice) {
    Setting setting;
    SchedulerConfig& config = setting.config;
    const std::uint32_t block = dice.between(1, 4);
    config = config_of({.num_blocks = dice.between(4, 18),
                        .block_tokens = block,
                        .budget = dice.between(2, 12),
                        .max_num_seqs = dice.between(1, 6),
                        .policy = dice.one_in(2) ? QueuePolicy::kPriority : QueuePolicy::kFcfs,
                        .async_scheduling = dice.one_in(2),
                        .prefix_caching = !dice.one_in(4)});
    // A third of the settings have physical blocks of several logical ones.
    const std::uint32_t num_units = dice.one_in(3) ? dice.between(2, 4) : 1;
    config.kv.groups[0].block_tokens *= num_units;
    if (dice.one_in(2)) {
        const std::uint32_t window_block = block * dice.between(1, 2) * num_units;
        const std::uint32_t window = dice.between(1, 3 * window_block);
        const auto kind = dice.one_in(3) ? kv_flat::Retention::kChunk : kv_flat::Retention::kSlidingWindow;
        config.kv.groups.push_back({"window", window_block, kind, window});
        if (dice.one_in(4)) config.kv.groups.erase(config.kv.groups.begin());
    }
    const bool has_states = dice.one_in(3);
    if (has_states) {
        for (std::uint32_t i = dice.between(1, 2); i > 0; --i) {
            const std::uint32_t state_block = block * num_units * dice.between(1, 2);
            config.kv.groups.push_back({"state", state_block, kv_flat::Retention::kState, 0});
        }
        config.kv.num_blocks += dice.between(2, 6);
    }
    config.kv.record_events = dice.one_in(4);
    if (config.kv.num_blocks % 2 == 1) config.kv.eviction.name = "lru";
    config.max_model_tokens = dice.between(16, 60);
    config.reserve_full_sequence = !dice.one_in(4);
    config.watermark = dice.one_in(3) ? 0.1 : 0.0;
    config.long_prefill_tokens = dice.one_in(4) ? dice.between(1, 6) : 0;
    config.max_adapters = dice.one_in(4) ? 1 : 0;
    setting.depth = dice.between(1, 3);
    if (config.async_scheduling && dice.one_in(3)) config.decode_stagger_steps = dice.between(1, setting.depth);
    if (!has_states && dice.one_in(2)) add_speculation(dice, setting);
    config.kv.in_flight_tokens = config.max_scheduled_tokens * setting.depth + config.lookahead_tokens;
    return setting;
}

/// What a worker knows of a request.
struct Resident {
    std::vector<TokenId> tokens;  ///< sampled ones included, delivered or not
    std::uint32_t num_computed = 0;
    std::vector<std::vector<kv_flat::BlockId>> table;
    std::uint32_t num_proposed = 0;
};

struct Client {
    RequestHandle handle;
    std::vector<TokenId> prompt;
    StopRules stop;
    bool gated = false;
    bool is_done = false;
    Resident resident;
};

struct Result {
    std::uint64_t step = 0;
    std::vector<TokenId> tokens;
    std::vector<std::uint32_t> offsets = {0};
};

/// One row as the workers compute it: the ids it reads, from token 0 to its last draft.
struct Run {
    Client* client = nullptr;
    std::vector<TokenId> ids;
    std::uint32_t begin = 0;
    std::uint32_t num_drafts = 0;
    bool samples = false;
};

/// KV memory that holds, by block and offset, a name of the prefix that was computed there.
class KvMemory {
  public:
    explicit KvMemory(const kv_flat::KvConfig& config) : groups_(config.groups), slots_(config.num_blocks) {
        for (auto& block : slots_) block.resize(2 * 4 * 4);
    }

    void copy(const PlannedCopy& ends) {
        require(ends.source != kv_flat::kNullBlock);
        require(ends.target != kv_flat::kNullBlock);
        slots_[ends.target] = slots_[ends.source];
    }

    template <typename Run>
    std::uint64_t& slot_of(const Run& run, kv_flat::GroupId group, std::uint32_t position) {
        const std::uint32_t block_tokens = groups_[group].block_tokens;
        const auto& table = run.client->resident.table[group];
        require(position / block_tokens < table.size());
        const kv_flat::BlockId block = table[position / block_tokens];
        require(block != kv_flat::kNullBlock);
        return slots_[block][position % block_tokens];
    }

    /// As vLLM's workers do before a step: a state moves to the column of the step's last token.
    void move_states(const Run& run) {
        if (run.begin == 0) return;
        for (kv_flat::GroupId group = 0; group < groups_.size(); ++group) {
            if (groups_[group].retention != kv_flat::Retention::kState) continue;
            const std::uint64_t state = state_of(run, group, run.begin);
            state_of(run, group, static_cast<std::uint32_t>(run.ids.size())) = state;
        }
    }

    /// A state takes a whole block: what another group had there is gone.
    void advance_states(const Run& run) {
        const auto names = prefix_names(run.ids);
        const auto end = static_cast<std::uint32_t>(run.ids.size());
        for (kv_flat::GroupId group = 0; group < groups_.size(); ++group) {
            if (groups_[group].retention != kv_flat::Retention::kState) continue;
            std::uint64_t& state = state_of(run, group, end);
            if (run.begin > 0) require(state == mix(names[run.begin - 1], group), "a row goes on from a wrong state");
            auto& slots = slots_[run.client->resident.table[group][(end - 1) / groups_[group].block_tokens]];
            std::ranges::fill(slots, std::uint64_t{0});
            state = mix(names[end - 1], group);
        }
    }

    std::uint64_t& state_of(const Run& run, kv_flat::GroupId group, std::uint32_t num_tokens) {
        const auto& table = run.client->resident.table[group];
        const std::uint32_t index = (num_tokens - 1) / groups_[group].block_tokens;
        require(index < table.size());
        require(table[index] != kv_flat::kNullBlock, "a state in the null block");
        return slots_[table[index]][0];
    }

    template <typename Run>
    void write(const Run& run) {
        const auto names = prefix_names(run.ids);
        for (kv_flat::GroupId group = 0; group < groups_.size(); ++group) {
            if (groups_[group].retention == kv_flat::Retention::kState) continue;
            for (std::uint32_t position = run.begin; position < run.ids.size(); ++position) {
                slot_of(run, group, position) = mix(names[position], group);
            }
        }
    }

    template <typename Run>
    void check_reads(const Run& run) {
        const auto names = prefix_names(run.ids);
        for (kv_flat::GroupId group = 0; group < groups_.size(); ++group) {
            const kv_flat::GroupSpec& spec = groups_[group];
            if (spec.retention == kv_flat::Retention::kState) continue;
            std::uint32_t first = 0;
            if (spec.retention == kv_flat::Retention::kSlidingWindow && run.begin + 1 > spec.window_tokens) {
                first = run.begin + 1 - spec.window_tokens;
            }
            if (spec.retention == kv_flat::Retention::kChunk)
                first = run.begin / spec.window_tokens * spec.window_tokens;
            for (std::uint32_t position = first; position < run.ids.size(); ++position) {
                require(slot_of(run, group, position) == mix(names[position], group), "a row reads a wrong KV slot");
            }
        }
    }

  private:
    std::vector<kv_flat::GroupSpec> groups_;
    std::vector<std::vector<std::uint64_t>> slots_;
};

inline const Request* first_running(const EngineState& engine) {
    const Request* first = nullptr;
    for (const OrderedRequests* set : {&engine.decoding, &engine.prefilling}) {
        if (!set->empty() && (first == nullptr || set->items()[0]->order < first->order)) first = set->items()[0];
    }
    return first;
}

/// Whoever ran first in the total order loses its KV to nobody but a request before it, which was waiting until now.
inline void check_displaced(const Request& first, const EngineState& engine, const ExecutionPlan& plan) {
    const Request* now_first = first_running(engine);
    const bool is_before = now_first != nullptr && now_first->order < first.order;
    require(is_before || !plan.ended.empty(), "the first lost its KV");
}

}  // namespace tokenspeed::scheduler_fsm::testing
