// SPDX-License-Identifier: Apache-2.0
// Flags by which a rank tells a peer that a copy into the peer's memory is complete.
//
// A flag holds the number of the last call whose part has arrived; blank memory reads as -1, calls count from 1 and may
// wrap. A peer may be one call ahead, so a reader takes its own call or a later one.
//
// Each rank has room for two calls, and call k uses room k mod 2. Let A send to B. A sends call k + 2 after its stream
// has waited for B's parts of call k + 1. B raised those after its products of call k + 1, which come behind everything
// that read call k in B's stream. So nothing unread is overwritten. Flags are written on a stream of their own, each
// behind the end of its copy and behind the flags before it; a late one only delays its reader.
//
// Nobody waits for ever: what spins here has one thread, the norms behind it do not spin, and a sum of many rows, which
// does, leaves room for a block (many_rows.cuh), so whatever is to raise a flag finds a multiprocessor as soon as the
// products before it have ended.
#pragma once

#include <stdint.h>

#include "exchange.cuh"

namespace tokenspeed::comm {

// The stream has ended the copy before; the release makes what it wrote visible with the flag.
__global__ void raise_flag_kernel(uint32_t* flag, uint32_t value) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__global__ void await_flag_kernel(const uint32_t* flag, uint32_t value, uint64_t timeout_ns) {
    Patience patience(timeout_ns);
    while (true) {
        uint32_t found;
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
        if (static_cast<int32_t>(found - value) >= 0) return;
        patience.wait();
    }
}

}  // namespace tokenspeed::comm
