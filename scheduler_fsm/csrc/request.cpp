// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/request.h"

namespace tokenspeed::scheduler_fsm {

Request::Request(RequestSpec spec, RequestHandle handle_, OrderKey order_)
    : handle(handle_),
      tokens(std::move(spec.prompt.tokens)),
      is_session(spec.is_session),
      ready(spec.ready),
      num_prompt_tokens(static_cast<std::uint32_t>(tokens.size())),
      stop(std::move(spec.stop)),
      chain(std::move(spec.prompt.chain)),
      order(order_),
      label(std::move(spec.label)),
      adapter(spec.adapter),
      may_read_cache(spec.may_read_cache),
      hints(spec.hints),
      content_marks(std::move(spec.prompt.content_marks)) {}

void Request::close_turn() noexcept {
    ++turn;
    awaits_input = true;
    num_computed_tokens = kv() == nullptr ? 0 : num_known_tokens() - 1;
    num_placeholders = 0;
    drafts.clear();
}

void Request::open_turn(TurnInput input, OrderKey new_order) {
    tokens.pop_back();
    chain.truncate(num_known_tokens());
    tokens.append(input.tokens);
    chain.extend(tokens.all());
    num_prompt_tokens = num_known_tokens();
    first_token_s = -1;
    stop = std::move(input.stop);
    order = new_order;
    awaits_input = false;
    announced = false;
    table_is_new = true;
    has_news = true;
    memo = {};
    num_overtaken_steps = 0;
}

}  // namespace tokenspeed::scheduler_fsm
