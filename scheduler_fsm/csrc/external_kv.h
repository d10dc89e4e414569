// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "scheduler_fsm/csrc/request.h"

namespace tokenspeed::scheduler_fsm {

/// Where KV may come from beside the pool: what the core knows of a connector.
class ExternalKv {
  public:
    struct Offer {
        std::uint32_t num_tokens = 0;  ///< that can be loaded behind the cached prefix
        bool is_async = false;         ///< the load runs beside the steps and is reported when it is done
        bool is_undecided = false;     ///< ask again in a later step
    };

    ExternalKv() = default;
    ExternalKv(const ExternalKv&) = delete;
    ExternalKv& operator=(const ExternalKv&) = delete;
    virtual ~ExternalKv() = default;

    /// What it has of a request whose first `num_cached_tokens` tokens are in the pool. Asked only about a request that
    /// starts at once when the answer is not "undecided".
    [[nodiscard]] virtual Offer ask(const Request& request, std::uint32_t num_cached_tokens) = 0;

    /// The request holds its blocks now.
    /// @param num_tokens that are to be loaded; 0 when the offer was not taken, and once more after an asynchronous
    /// load
    virtual void accept(const Request& request, std::uint32_t num_tokens) = 0;
};

}  // namespace tokenspeed::scheduler_fsm
