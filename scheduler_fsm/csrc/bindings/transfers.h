// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "scheduler_fsm/csrc/bindings/request_view.h"
#include "scheduler_fsm/csrc/external_kv.h"

namespace tokenspeed::bindings {

class Core;

/// A connector behind two Python functions. They must not raise: what is planned cannot be taken back.
class ConnectorCallbacks final : public scheduler_fsm::ExternalKv {
  public:
    /// @param offer (Request, num_cached_tokens) -> (num_tokens | None, is_async)
    /// @param accept (Request, block ids by group, num_cached_tokens, num_tokens) -> None
    ConnectorCallbacks(const RequestViews& views, py::object offer, py::object accept)
        : views_(views), offer_(std::move(offer)), accept_(std::move(accept)) {}

    [[nodiscard]] Offer ask(const scheduler_fsm::Request& request, std::uint32_t num_cached_tokens) override;
    void accept(const scheduler_fsm::Request& request, std::uint32_t num_tokens) override;

  private:
    const RequestViews& views_;
    py::object offer_;
    py::object accept_;
};

/// What a connector port does with a core.
void bind_transfers(py::class_<Core>& core);

}  // namespace tokenspeed::bindings
