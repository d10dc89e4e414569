// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/request.h"

namespace tokenspeed::scheduler_fsm {

Request::Request(RequestSpec spec, RequestHandle handle_, OrderKey order_)
    : handle(handle_),
      order(order_),
      label(std::move(spec.label)),
      stop(std::move(spec.stop)),
      adapter(spec.adapter),
      may_read_cache(spec.may_read_cache),
      tokens(std::move(spec.prompt.tokens)),
      chain(std::move(spec.prompt.chain)),
      num_prompt_tokens(static_cast<std::uint32_t>(tokens.size())),
      ready(spec.ready) {}

}  // namespace tokenspeed::scheduler_fsm
