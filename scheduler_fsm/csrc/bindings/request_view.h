// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "scheduler_fsm/csrc/fetch_ahead.h"
#include "scheduler_fsm/csrc/request.h"

namespace tokenspeed::bindings {

namespace py = pybind11;

/// What the bulk paths must know of vLLM's request, without asking Python for it.
struct RequestView {
    py::object req_id;   ///< str, the very object: its hash is computed once
    py::object request;  ///< vLLM's Request
    std::uint32_t client_index = 0;
    bool is_plain = false;  ///< its output rows carry nothing but tokens
    bool has_grammar = false;
};

/// Views by request index.
class RequestViews {
  public:
    void put(scheduler_fsm::RequestHandle handle, RequestView view) {
        if (views_.size() <= handle.index) views_.resize(handle.index + 1);
        views_[handle.index] = std::move(view);
    }
    RequestView& at(scheduler_fsm::RequestHandle handle) noexcept { return views_[handle.index]; }
    /// Like scheduler_fsm::fetch_ahead, for walks that read views and the Python ids in them.
    template <typename HandleAt>
    void fetch_ahead(std::size_t turn, std::size_t num_turns, const HandleAt& handle_at) const noexcept {
        using scheduler_fsm::kFetchTurns;
        if (turn + 2 * kFetchTurns < num_turns) __builtin_prefetch(&of(handle_at(turn + 2 * kFetchTurns)));
        if (turn + kFetchTurns < num_turns) __builtin_prefetch(of(handle_at(turn + kFetchTurns)).req_id.ptr());
    }
    void drop(scheduler_fsm::RequestHandle handle) { views_[handle.index] = {}; }
    [[nodiscard]] const RequestView& of(scheduler_fsm::RequestHandle handle) const noexcept {
        return views_[handle.index];
    }
    [[nodiscard]] const RequestView& of(const scheduler_fsm::Request& request) const noexcept {
        return of(request.handle);
    }

  private:
    std::vector<RequestView> views_;
};

/// Handles cross into Python as one integer.
[[nodiscard]] constexpr std::uint64_t pack(scheduler_fsm::RequestHandle handle) noexcept {
    return (std::uint64_t{handle.generation} << 32U) | handle.index;
}
[[nodiscard]] constexpr scheduler_fsm::RequestHandle unpack(std::uint64_t packed) noexcept {
    return {static_cast<std::uint32_t>(packed), static_cast<std::uint32_t>(packed >> 32U)};
}

}  // namespace tokenspeed::bindings
