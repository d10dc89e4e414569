// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kv_flat/csrc/block_key.h"
#include "kv_flat/csrc/eviction_policy.h"
#include "scheduler_fsm/csrc/encoder_input.h"
#include "scheduler_fsm/csrc/request_state.h"
#include "scheduler_fsm/csrc/stop_rules.h"
#include "scheduler_fsm/csrc/token_log.h"

namespace tokenspeed::scheduler_fsm {

inline constexpr std::size_t kCacheLineBytes = 64;

/// Names a request across calls. A handle that outlived its request is recognised by its generation.
struct RequestHandle {
    std::uint32_t index = 0;
    std::uint32_t generation = 0;

    friend bool operator==(const RequestHandle&, const RequestHandle&) = default;
};

/// A prompt whose keys are already computed: made once, on arrival, off the step.
struct PreparedPrompt {
    std::vector<TokenId> tokens;
    kv_flat::KeyChain chain;
    std::vector<EncoderInputSpec> encoder_inputs;
    std::vector<std::uint32_t> content_marks;  ///< empty: not asked for
};

struct RequestSpec {
    std::string label;  ///< the client's request id, for messages
    PreparedPrompt prompt;
    StopRules stop;
    std::int64_t priority = 0;
    double arrival_time_s = 0.0;
    std::optional<double> rank;  ///< its place in the queue among equals of a priority, instead of its arrival
    std::int32_t adapter = 0;    ///< LoRA adapter number; 0 is none
    bool may_read_cache = true;  ///< false when every prompt position must be computed (prompt logprobs)
    bool ready = true;           ///< false until Scheduler::open_gate (grammar still compiling)
    kv_flat::SessionHints hints;
    double target_tps = -1;   ///< output tokens per second; 0: no rate, negative: the scheduler's
    bool is_session = false;  ///< goes on with new input after each stop, until it is finished from outside
};

/// The next chunk of a session's input.
struct TurnInput {
    std::vector<TokenId> tokens;
    StopRules stop;
    double arrival_time_s = 0.0;
    std::optional<double> rank;
};

/// Place of a request in the one total order that admission, service and victim choice share: smaller goes first.
struct OrderKey {
    std::int64_t priority = 0;
    double arrival_time_s = 0.0;  ///< or the rank that a queue order of another distribution gave it
    std::uint64_t sequence = 0;

    friend bool operator<(const OrderKey& a, const OrderKey& b) noexcept {
        return std::tie(a.priority, a.arrival_time_s, a.sequence) < std::tie(b.priority, b.arrival_time_s, b.sequence);
    }
};

/// Why a waiting request was passed over for lack of memory, so that trying again costs nothing until that may have
/// changed.
struct CapacityMemo {
    std::uint32_t needed_blocks = 0;  ///< 0: nothing remembered
    std::uint32_t least_blocks = 0;   ///< what it would need if others adopted all of its cached prefix
    bool has_missing_key = false;
    kv_flat::Digest missing_key;  ///< first key that was not cached; once it is, the request needs less
    kv_flat::GroupId missing_group = 0;
};

/// What a connector adds to a request's KV.
struct LoadProgress {
    std::uint32_t begin_tokens = 0;  ///< of the last offer: the cached prefix ends here
    std::uint32_t end_tokens = 0;    ///< and what is loaded here
    std::uint32_t valid_tokens = 0;  ///< less than the end once a part of the load has failed
    std::uint32_t warm_tokens = 0;   ///< what its blocks hold before its first row; never to be zeroed
    bool undecided = false;          ///< the connector wants to be asked again
    bool barred = false;             ///< a load failed: what is missing is computed

    [[nodiscard]] std::uint32_t num_tokens() const noexcept { return end_tokens - begin_tokens; }
};

/// A request and its progress.
///
///    0                         computed - in_flight        known     + placeholders     + drafts
///    |---- KV certainly written ----|--- steps in flight ---|-- sampled, not delivered --|-- proposed --|
class Request {
  public:
    Request(RequestSpec spec, RequestHandle handle, OrderKey order);

    const RequestHandle handle;

    // First what each step of a running request reads or writes: `kHotBytes`.
    RequestState state;
    TokenLog tokens;                    ///< known ids: the prompt, then delivered output
    std::uint64_t void_until_step = 0;  ///< results of steps up to here are worth nothing: they read KV that never came
    const bool is_session;
    bool awaits_input = false;  ///< a session whose turn is over
    bool announced = false;     ///< a worker has seen it, with its present prompt
    bool has_news = true;       ///< nothing was delivered since it was submitted, retracted or admitted
    bool table_is_new = false;  ///< its next row carries the whole table
    bool ready;
    std::uint64_t eligible_step = 0;  ///< earliest step of its next decode
    std::uint64_t last_planned_step = 0;
    std::uint32_t num_prompt_tokens;
    std::uint32_t num_computed_tokens = 0;   ///< whose step has been planned
    std::uint32_t num_in_flight_tokens = 0;  ///< planned, result not seen; counts retracted steps too
    std::uint32_t num_placeholders = 0;      ///< sampled on the device, id not delivered
    std::uint32_t incarnation = 0;           ///< admissions so far: tells a stale step from a current one
    std::uint32_t turn = 0;                  ///< of a session: tells rows of an earlier turn from current ones
    std::vector<TokenId> drafts;             ///< to be verified next; -1 while only the worker knows them
    StopRules stop;
    kv_flat::KeyChain chain;

    OrderKey order;  ///< changes only between two turns, while it is in no ordered set
    const std::string label;
    const std::int32_t adapter;
    const bool may_read_cache;
    const kv_flat::SessionHints hints;
    std::vector<std::uint32_t> content_marks;  ///< of the prompt, until its first admission
    std::unique_ptr<EncoderInputs> encoder;    ///< null without encoder inputs

    std::uint32_t junction_tokens = 0;    ///< a longer prefix is cached, but for its state: kept when computed; 0: none
    std::uint32_t num_cached_tokens = 0;  ///< of its last admission: served by the prefix cache
    std::uint32_t num_retractions = 0;
    std::uint64_t retracted_step = 0;  ///< not admitted again in the plan that took its KV
    double period_s = 0;               ///< seconds per token that are aimed at; 0: no rate
    double first_token_s = -1;         ///< when its first token was delivered; only with a rate per user
    std::uint64_t lane_key = 0;        ///< virtual deadline in the short lane
    std::uint64_t passed_over_step = 0;
    std::uint32_t num_overtaken_steps = 0;
    CapacityMemo memo;
    RequestHandle leader;             ///< computes a prefix that this one waits for
    std::uint32_t shared_tokens = 0;  ///< length of that prefix; 0: waits for none
    LoadProgress load;

    /// Leading bytes that hold what steps need: with a thousand requests, every line of them comes from far away.
    static constexpr std::size_t kHotBytes = 6 * kCacheLineBytes - sizeof(RequestHandle);

    [[nodiscard]] std::uint32_t num_known_tokens() const noexcept { return static_cast<std::uint32_t>(tokens.size()); }
    [[nodiscard]] std::uint32_t num_output_tokens() const noexcept { return num_known_tokens() - num_prompt_tokens; }
    [[nodiscard]] std::span<const TokenId> output() const { return tokens.all().subspan(num_prompt_tokens); }

    /// Tokens that can be computed now.
    [[nodiscard]] std::uint32_t num_pending_tokens() const noexcept {
        return num_known_tokens() + num_placeholders + static_cast<std::uint32_t>(drafts.size()) - num_computed_tokens;
    }
    /// Tokens whose KV certainly exists.
    [[nodiscard]] std::uint32_t num_confirmed_tokens() const noexcept {
        return num_computed_tokens > num_in_flight_tokens ? num_computed_tokens - num_in_flight_tokens : 0;
    }

    /// It has ended; as long as it drains, it still holds blocks.
    [[nodiscard]] bool is_finished() const noexcept { return std::holds_alternative<Finished>(state) || is_draining(); }
    [[nodiscard]] bool is_draining() const noexcept { return std::holds_alternative<Draining>(state); }
    [[nodiscard]] bool is_idle() const noexcept { return std::holds_alternative<Idle>(state); }
    [[nodiscard]] bool is_running() const noexcept {
        return is_prefilling() || std::holds_alternative<Decoding>(state);
    }
    [[nodiscard]] bool is_loading() const noexcept { return std::holds_alternative<Prefetching>(state); }
    [[nodiscard]] bool is_loaded() const noexcept { return std::holds_alternative<Prefetched>(state); }
    [[nodiscard]] bool is_prefilling() const noexcept { return std::holds_alternative<Prefilling>(state); }
    [[nodiscard]] bool was_retracted() const noexcept { return std::holds_alternative<Retracted>(state); }

    /// The KV it holds, or null.
    [[nodiscard]] kv_flat::KvSequence* kv() noexcept {
        if (auto* prefilling = std::get_if<Prefilling>(&state)) return &prefilling->kv;
        if (auto* decoding = std::get_if<Decoding>(&state)) return &decoding->kv;
        if (auto* idle = std::get_if<Idle>(&state)) return &idle->kv;
        if (auto* loading = std::get_if<Prefetching>(&state)) return &loading->kv;
        if (auto* loaded = std::get_if<Prefetched>(&state)) return &loaded->kv;
        if (auto* draining = std::get_if<Draining>(&state)) return &draining->kv;
        return nullptr;
    }
    [[nodiscard]] const kv_flat::KvSequence* kv() const noexcept { return const_cast<Request*>(this)->kv(); }

    void append_output(TokenId token) { tokens.push_back(token); }

    /// A session's turn ended with the last known token: everything before it is computed, nothing behind it counts.
    void close_turn() noexcept;
    /// Makes all tokens but the last one, which no step computes, and `input` the prompt of the next turn.
    void open_turn(TurnInput input, OrderKey new_order);
};

}  // namespace tokenspeed::scheduler_fsm
