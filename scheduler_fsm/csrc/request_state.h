// SPDX-License-Identifier: Apache-2.0
#pragma once

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

struct Finished : Linear {
    explicit Finished(FinishReason why) noexcept : reason(why) {}
    FinishReason reason;
};

using RequestState = std::variant<Submitted, Prefilling, Decoding, Idle, Retracted, Finished>;

// The transitions. A pair that is not here does not compile (tests/cpp/compile_fail proves it for each illegal pair).

[[nodiscard]] inline Prefilling admit(Submitted&& /*from*/, kv_flat::KvSequence&& kv, RequestSlot&& slot) noexcept {
    return {std::move(kv), std::move(slot)};
}
[[nodiscard]] inline Prefilling admit(Retracted&& /*from*/, kv_flat::KvSequence&& kv, RequestSlot&& slot) noexcept {
    return {std::move(kv), std::move(slot)};
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

[[nodiscard]] constexpr std::string_view state_name(const RequestState& state) noexcept {
    constexpr std::string_view kNames[] = {"Submitted", "Prefilling", "Decoding", "Idle", "Retracted", "Finished"};
    return kNames[state.index()];
}

}  // namespace tokenspeed::scheduler_fsm
