// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kv_flat/csrc/flat_kv.h"
#include "scheduler_fsm/csrc/request.h"

namespace tokenspeed::bindings {

namespace py = pybind11;

/// The flat KV manager without a scheduler: sequences come and go one after the other, at given times. What benchmarks
/// and tests drive when only the cache is of interest.
class KvReplay {
  public:
    explicit KvReplay(kv_flat::KvConfig config) : kv_(std::move(config)) {}

    void set_time(double now_s) noexcept { kv_.pool().set_time(now_s); }

    /// Looks a prompt up, computes what is missing, publishes all of it and gives it back.
    /// @returns tokens that the cache served
    /// @throws std::runtime_error when the pool is too small for it
    std::uint32_t serve(const scheduler_fsm::PreparedPrompt& prompt, const kv_flat::Departure& departure);

    /// Length of the cached prefix.
    [[nodiscard]] std::uint32_t probe(const scheduler_fsm::PreparedPrompt& prompt) const;

    /// Like `serve`, but keeps what it took, so that others run beside it. @returns a number for `let_go`
    std::size_t hold(const scheduler_fsm::PreparedPrompt& prompt, const kv_flat::Departure& departure);
    void let_go(std::size_t held);

    /// Takes blocks for so many tokens and gives them back unpublished.
    void cycle(std::uint32_t num_tokens);

    [[nodiscard]] const kv_flat::FlatKv& kv() const noexcept { return kv_; }
    /// Throws std::logic_error naming the first broken invariant.
    void check_integrity() const;

  private:
    struct Held {
        kv_flat::KvSequence sequence;
        kv_flat::Departure departure;
    };
    [[nodiscard]] kv_flat::KvSequence compute(const scheduler_fsm::PreparedPrompt& prompt, std::uint64_t session,
                                              std::uint32_t& num_hit_tokens);

    kv_flat::FlatKv kv_;
    std::vector<std::unique_ptr<Held>> held_;
};

void bind_kv_replay(py::module_& module);

}  // namespace tokenspeed::bindings
