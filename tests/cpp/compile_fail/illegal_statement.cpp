// SPDX-License-Identifier: Apache-2.0
// One of each state and handle; TOKENSPEED_STATEMENT then does something with them that must not compile.
#include "tests/cpp/compile_fail/states_and_handles.h"

using namespace tokenspeed;
using namespace tokenspeed::scheduler_fsm;

[[maybe_unused]] static void use(kv_flat::BlockPool& pool, kv_flat::BlockRef& block, kv_flat::BlockTable& table,
                                 kv_flat::KvSequence& kv, RequestSlot& slot, Submitted& submitted,
                                 Prefilling& prefilling, Decoding& decoding, Idle& idle, Retracted& retracted,
                                 Finished& finished, Prefetching& prefetching, Prefetched& prefetched,
                                 Draining& draining) {
#ifdef TOKENSPEED_ILLEGAL
    TOKENSPEED_STATEMENT;
#endif
    static_cast<void>(pool);
    static_cast<void>(block);
    static_cast<void>(table);
    static_cast<void>(kv);
    static_cast<void>(slot);
    static_cast<void>(submitted);
    static_cast<void>(prefilling);
    static_cast<void>(decoding);
    static_cast<void>(idle);
    static_cast<void>(retracted);
    static_cast<void>(finished);
    static_cast<void>(prefetching);
    static_cast<void>(prefetched);
    static_cast<void>(draining);
}
