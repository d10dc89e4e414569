// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/decode_pass.h"

#include <algorithm>
#include <vector>

#include "scheduler_fsm/csrc/fetch_ahead.h"

namespace tokenspeed::scheduler_fsm {

void DecodePass::run() {
    EngineState& engine = step_.engine;
    // A decode may end here or lose its blocks to an older one, so walk a copy.
    const auto items = engine.decoding.items();
    std::vector<Request*> order(items.begin(), items.end());
    // One row, or what a prompt needs at least, stays for prefill: with more decodes than room, prompts would otherwise
    // never start.
    const bool someone_waits = !engine.waiting.empty() || !engine.transfers.loaded.empty();
    const bool prefill_waits = !engine.prefilling.empty() || (someone_waits && engine.has_slot());
    const std::uint32_t capacity = step_.row_capacity();
    const std::uint32_t most_kept = engine.kept_tokens > 1 ? capacity : std::max(capacity, 1U) - 1;
    const std::uint32_t kept = prefill_waits ? std::min(engine.kept_tokens, most_kept) : 0;
    std::uint32_t rows_left = capacity - kept;
    step_.token_budget -= kept;
    // When not all fit, the next step begins behind the last one that was served.
    if (order.size() > rows_left) {
        const std::uint64_t begin = engine.step * rows_left % order.size();
        std::ranges::rotate(order, order.begin() + static_cast<std::ptrdiff_t>(begin));
    }
    const bool reads_tables = engine.kv.has_dying_blocks();
    const auto request_at = [&order](std::size_t turn) { return order[turn]; };
    for (std::size_t turn = 0; turn < order.size(); ++turn) {
        fetch_ahead(turn, order.size(), request_at);
        if (reads_tables) {
            fetch_parts_ahead(turn, order.size(), request_at, [](const Request& request) {
                if (const kv_flat::KvSequence* sequence = request.kv()) sequence->fetch();
            });
        }
        Request* request = order[turn];
        const auto num_left = static_cast<std::uint32_t>(order.size() - turn - 1);
        const std::uint32_t room = step_.room_for_one();
        if (room == 0 || rows_left == 0) break;
        if (!std::holds_alternative<Decoding>(request->state)) continue;
        // Drafts give way before another request's own token does.
        const std::uint32_t others = std::min(num_left, rows_left - 1);
        const std::uint32_t fair = room > others ? room - others : 1;
        const std::uint32_t num_tokens = std::min(wanted_tokens(*request), fair);
        if (num_tokens == 0) continue;
        serve(*request, num_tokens);
        --rows_left;
    }
    step_.token_budget += kept;
}

std::uint32_t DecodePass::wanted_tokens(const Request& request) const noexcept {
    if (step_.engine.step < request.eligible_step) return 0;
    if (request.num_placeholders > 0) {
        // The steps in flight bring it to max_tokens even if every draft in them is rejected: nothing is left to do.
        const std::uint64_t sure_end = std::uint64_t{request.num_computed_tokens} + 2 - request.num_placeholders;
        if (sure_end >= std::uint64_t{request.num_prompt_tokens} + request.stop.max_tokens) return 0;
    }
    return step_.computable_tokens(request);
}

void DecodePass::serve(Request& request, std::uint32_t num_tokens) {
    step_.engine.kv.retire(*request.kv(), request.num_confirmed_tokens(), request.num_computed_tokens);
    const std::uint32_t missing = step_.missing_blocks(request, num_tokens);
    if (missing > 0 && !step_.make_room(request, missing)) {
        num_tokens = 1;  // without drafts it may still fit
        if (step_.missing_blocks(request, num_tokens) > step_.free_blocks_for(request)) {
            step_.end_if_pool_is_its_own(request);
            return;
        }
    }
    step_.add_row(request, num_tokens);
}

}  // namespace tokenspeed::scheduler_fsm
