// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/idle_sessions.h"

#include <map>

namespace tokenspeed::scheduler_fsm {

std::uint32_t IdleSessions::num_blocks() const noexcept {
    std::uint32_t sum = 0;
    for (const Request* session : step_.engine.idle) sum += session->kv()->num_held_blocks();
    return sum;
}

bool IdleSessions::retract_one() {
    if (step_.engine.idle.empty()) return false;
    step_.retract(*step_.engine.idle.front());
    return true;
}

void IdleSessions::free_slot() {
    while (step_.engine.slots.num_free() == 0 && retract_one()) continue;
}

bool IdleSessions::free_adapter(std::int32_t adapter) {
    EngineState& engine = step_.engine;
    if (engine.adapters.admits(adapter)) return true;
    std::map<std::int32_t, std::uint32_t> num_idle;
    for (const Request* session : engine.idle) ++num_idle[session->adapter];
    for (const Request* session : engine.idle) {
        if (session->adapter == 0 || num_idle.at(session->adapter) < engine.adapters.num_users(session->adapter))
            continue;
        const std::int32_t idle_adapter = session->adapter;
        const std::vector<Request*> all = engine.idle;
        for (Request* other : all) {
            if (other->adapter == idle_adapter) step_.retract(*other);
        }
        return true;
    }
    return false;
}

}  // namespace tokenspeed::scheduler_fsm
