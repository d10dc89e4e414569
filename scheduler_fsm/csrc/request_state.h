// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstdint>
#include <string_view>
#include <utility>
#include <variant>

#include "kv_flat/csrc/kv_sequence.h"
#include "scheduler_fsm/csrc/request_slot.h"

namespace tokenspeed::scheduler_fsm {

enum class FinishReason : std::uint8_t {
    kStop,        ///< end-of-sequence token or a stop token
    kLength,      ///< max_tokens, the model's length, or a pool that one request fills alone
    kAbort,       ///< the client went away or asked for it
    kTimeout,     ///< the request's deadline passed
    kError,       ///< refused, or failed outside the scheduler
    kRepetition,  ///< repetition detection
};

/// States own exactly what a request holds in them, so leaving a state cannot forget anything. None can be copied.
struct Linear {
    Linear() = default;
    Linear(Linear&&) = default;
    Linear& operator=(Linear&&) = default;
    Linear(const Linear&) = delete;
    Linear& operator=(const Linear&) = delete;
    ~Linear() = default;
};

/// Waiting for its first admission.
struct Submitted : Linear {};

/// Computing tokens whose ids are known; nothing is sampled before the last of them.
struct Prefilling {
    kv_flat::KvSequence kv;
    RequestSlot slot;
};

/// Every known token is computed or planned; each step samples.
struct Decoding {
    kv_flat::KvSequence kv;
    RequestSlot slot;
};

/// A session between two turns: its client has the answer to all input so far.
struct Idle {
    kv_flat::KvSequence kv;
    RequestSlot slot;
};

/// Its KV was taken away; it waits to be admitted again, or for input.
struct Retracted : Linear {};

/// A connector loads KV into its blocks while steps go on without it. Nobody takes them away before the load has come
/// in.
struct Prefetching {
    kv_flat::KvSequence kv;
};

/// Its load has come in; it waits for a slot.
struct Prefetched {
    kv_flat::KvSequence kv;
};

/// It has ended, but a connector or a step in flight may still use its blocks.
struct Draining {
    kv_flat::KvSequence kv;
    FinishReason reason;
    bool awaits_verdict = true;  ///< the connector was not yet asked whether it sends the blocks
    bool awaits_send = false;
    bool awaits_load = false;
};

struct Finished : Linear {
    explicit Finished(FinishReason why) noexcept : reason(why) {}
    FinishReason reason;
};

using RequestState =
    std::variant<Submitted, Prefilling, Decoding, Idle, Retracted, Finished, Prefetching, Prefetched, Draining>;

// The transitions. A pair that is not here does not compile (tests/cpp/compile_fail proves it for each illegal pair).

[[nodiscard]] inline Prefilling admit(Submitted&& /*from*/, kv_flat::KvSequence&& kv, RequestSlot&& slot) noexcept {
    return {std::move(kv), std::move(slot)};
}
[[nodiscard]] inline Prefilling admit(Retracted&& /*from*/, kv_flat::KvSequence&& kv, RequestSlot&& slot) noexcept {
    return {std::move(kv), std::move(slot)};
}
[[nodiscard]] inline Prefilling admit(Prefetched&& from, RequestSlot&& slot) noexcept {
    return {std::move(from.kv), std::move(slot)};
}
[[nodiscard]] inline Decoding start_decoding(Prefilling&& from) noexcept {
    return {std::move(from.kv), std::move(from.slot)};
}

[[nodiscard]] inline Idle end_turn(Decoding&& from) noexcept { return {std::move(from.kv), std::move(from.slot)}; }
[[nodiscard]] inline Prefilling start_turn(Idle&& from) noexcept { return {std::move(from.kv), std::move(from.slot)}; }

namespace detail {
// Takes the state by value: its blocks and its slot are given back when this returns.
template <typename State>
void end_of(State /*state*/) noexcept {}
}  // namespace detail

[[nodiscard]] inline Retracted retract(Prefilling&& from) noexcept {
    detail::end_of(std::move(from));
    return {};
}
[[nodiscard]] inline Retracted retract(Decoding&& from) noexcept {
    detail::end_of(std::move(from));
    return {};
}
[[nodiscard]] inline Retracted retract(Idle&& from) noexcept {
    detail::end_of(std::move(from));
    return {};
}

[[nodiscard]] inline Retracted retract(Prefetched&& from) noexcept {
    detail::end_of(std::move(from));
    return {};
}

/// A retraction that leaves the blocks with the caller: a step in flight still uses them.
[[nodiscard]] inline std::pair<Retracted, kv_flat::KvSequence> retract_fenced(Prefilling&& from) noexcept {
    kv_flat::KvSequence kv = std::move(from.kv);
    detail::end_of(std::move(from));
    return {Retracted{}, std::move(kv)};
}
[[nodiscard]] inline std::pair<Retracted, kv_flat::KvSequence> retract_fenced(Decoding&& from) noexcept {
    kv_flat::KvSequence kv = std::move(from.kv);
    detail::end_of(std::move(from));
    return {Retracted{}, std::move(kv)};
}

[[nodiscard]] inline Prefetching prefetch(Submitted&& /*from*/, kv_flat::KvSequence&& kv) noexcept {
    return {std::move(kv)};
}
[[nodiscard]] inline Prefetching prefetch(Retracted&& /*from*/, kv_flat::KvSequence&& kv) noexcept {
    return {std::move(kv)};
}
[[nodiscard]] inline Prefetched load_done(Prefetching&& from) noexcept { return {std::move(from.kv)}; }

/// Back to where it waited before the load: `Submitted` or `Retracted`.
template <typename Waiting>
    requires std::same_as<Waiting, Submitted> || std::same_as<Waiting, Retracted>
[[nodiscard]] Waiting load_failed(Prefetching&& from) noexcept {
    detail::end_of(std::move(from));
    return {};
}

[[nodiscard]] inline Draining drain(Prefetching&& from, FinishReason why) noexcept {
    return {std::move(from.kv), why, true, false, true};
}
[[nodiscard]] inline Draining drain(Prefetched&& from, FinishReason why) noexcept { return {std::move(from.kv), why}; }
[[nodiscard]] inline Draining drain(Prefilling&& from, FinishReason why) noexcept {
    kv_flat::KvSequence kv = std::move(from.kv);
    detail::end_of(std::move(from));
    return {std::move(kv), why};
}
[[nodiscard]] inline Draining drain(Decoding&& from, FinishReason why) noexcept {
    kv_flat::KvSequence kv = std::move(from.kv);
    detail::end_of(std::move(from));
    return {std::move(kv), why};
}
[[nodiscard]] inline Finished settle(Draining&& from) noexcept {
    const FinishReason why = from.reason;
    detail::end_of(std::move(from));
    return Finished(why);
}

[[nodiscard]] inline Finished finish(Submitted&& /*from*/, FinishReason why) noexcept { return Finished(why); }
[[nodiscard]] inline Finished finish(Retracted&& /*from*/, FinishReason why) noexcept { return Finished(why); }
[[nodiscard]] inline Finished finish(Prefilling&& from, FinishReason why) noexcept {
    detail::end_of(std::move(from));
    return Finished(why);
}
[[nodiscard]] inline Finished finish(Decoding&& from, FinishReason why) noexcept {
    detail::end_of(std::move(from));
    return Finished(why);
}

[[nodiscard]] inline Finished finish(Idle&& from, FinishReason why) noexcept {
    detail::end_of(std::move(from));
    return Finished(why);
}
[[nodiscard]] inline Finished finish(Prefetched&& from, FinishReason why) noexcept {
    detail::end_of(std::move(from));
    return Finished(why);
}

[[nodiscard]] constexpr std::string_view state_name(const RequestState& state) noexcept {
    constexpr std::string_view kNames[] = {"Submitted", "Prefilling",  "Decoding",   "Idle",    "Retracted",
                                           "Finished",  "Prefetching", "Prefetched", "Draining"};
    return kNames[state.index()];
}

}  // namespace tokenspeed::scheduler_fsm
