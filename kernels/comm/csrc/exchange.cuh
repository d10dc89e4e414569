// SPDX-License-Identifier: Apache-2.0
// How ranks exchange rows: every rank writes its row into the staging memory of every other rank, and reads its own.
//
// A 64-bit word carries 32 bits of payload and the 32 bits of an epoch, the number of the call for this row. Such a
// word is written and read as one aligned scalar, so a reader that sees the epoch it waits for has the payload that
// belongs to it. There is no fence, no separate flag and no barrier; only the reader waits, on its own memory. (NCCL's
// low-latency protocol rests on the same property.)
//
// Why two slots suffice. Call k of a row uses slot k mod 2. Let A write call k + 2 into B's slot; it must not hit a
// word of call k that B has not read yet.
//   1. A's launch for call k + 2 writes nothing before A's launch for call k + 1 has ended (one stream, or streams that
//   wait for
//      each other; a launch that starts early waits inside), and that ended only after its threads had read the words
//      of call k + 1 of all ranks, B's among them.
//   2. B wrote those words in its launch for call k + 1, which wrote nothing before B's launch for call k had ended.
//   3. B's launch for call k ended only after its threads had read all words of call k: their values are in its output.
// So B's reads of call k precede A's writes of call k + 2. Rows are independent: the argument uses the calls that
// contain this row, which are the same ones on all ranks when the ranks make the same calls in the same order, whatever
// other rows these calls have. Every rank counts the calls of a row itself, in memory of its own device, so a replayed
// graph goes on counting.
//
// Why an epoch never matches a stale word. All calls have the same hidden size, so each call of a row writes every word
// of its slot. While call k is waited for, a word holds epoch k - 2 or k, and k - 2 is not k modulo 2^32. Before the
// first two calls a word holds 0, and their epochs are 1 and 2. The epoch may pass through zero: by then no word of
// that row holds the initial 0.
#pragma once

#include <stdint.h>

#include "params.cuh"

namespace tokenspeed::comm {

struct Packet {
    uint64_t first, second;
};

__device__ __forceinline__ uint64_t word(uint32_t payload, uint32_t epoch) {
    return static_cast<uint64_t>(epoch) << 32 | payload;
}

__device__ __forceinline__ uint32_t payload_of(uint64_t word) { return static_cast<uint32_t>(word); }

__device__ __forceinline__ bool holds(const Packet& packet, uint32_t epoch) {
    return static_cast<uint32_t>(packet.first >> 32) == epoch && static_cast<uint32_t>(packet.second >> 32) == epoch;
}

// The two words of a packet are two accesses of 64 bits for the memory model; nothing is assumed about their order.
__device__ __forceinline__ void write_packet(char* address, const Packet& packet) {
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(address), "l"(packet.first), "l"(packet.second)
                 : "memory");
}

__device__ __forceinline__ Packet read_packet(const char* address) {
    Packet packet;
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
                 : "=l"(packet.first), "=l"(packet.second)
                 : "l"(address)
                 : "memory");
    return packet;
}

__device__ __forceinline__ uint64_t now_ns() {
    uint64_t time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}

// Ends the process's use of the device when a peer does not come: an error that the host sees is better than a hang.
class Patience {
  public:
    __device__ explicit Patience(uint64_t timeout_ns) : timeout_ns_(timeout_ns) {}

    __device__ __forceinline__ void wait() {
        if (++rounds_ % kRoundsPerLook != 0) return;
        const uint64_t now = now_ns();
        if (since_ == 0) since_ = now;
        if (now - since_ > timeout_ns_) __trap();
    }

  private:
    static constexpr uint32_t kRoundsPerLook = 1024;
    uint64_t timeout_ns_, since_ = 0;
    uint32_t rounds_ = 0;
};

// One row's place in the staging memory of all ranks, for one call.
class RowExchange {
  public:
    __device__ RowExchange(const Params& params, int row, uint32_t epoch)
        : params_(params), epoch_(epoch), lanes_(params.hidden / kLaneElements) {
        const int64_t slot = epoch % kSlots;
        const int64_t bytes = row_bytes(params.hidden);
        source_stride_ = params.max_rows * bytes;
        row_offset_ = slot * params.num_ranks * source_stride_ + row * bytes;
    }

    // Writes 16 bytes of this rank's row to every other rank.
    template <int kRanks>
    __device__ __forceinline__ void send(int lane, const uint4& data) const {
        const Packet first = {word(data.x, epoch_), word(data.y, epoch_)};
        const Packet second = {word(data.z, epoch_), word(data.w, epoch_)};
#pragma unroll
        for (int step = 1; step < kRanks; ++step) {
            const int peer = (params_.rank + step) % kRanks;  // each rank starts with another one
            char* place = address(peer, params_.rank, lane);
            write_packet(place, first);
            write_packet(place + lanes_ * kPacketBytes, second);
        }
    }

    // Reads 16 bytes of the rows of kCount ranks from `first` on, this rank's from `own`; waits until they are there.
    // All packets are asked for before any is looked at, so their latencies overlap.
    template <int kCount>
    __device__ __forceinline__ void receive(int lane, int first, const uint4& own, uint4 (&data)[kCount]) const {
        Patience patience(params_.timeout_ns);
        while (true) {
            Packet low[kCount], high[kCount];
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                // This rank's own place stays as it was set up; what it holds is not looked at.
                const char* place = address(params_.rank, first + i, lane);
                low[i] = read_packet(place);
                high[i] = read_packet(place + lanes_ * kPacketBytes);
            }
            bool all = true;
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                const bool is_own = first + i == params_.rank;
                all &= is_own || (holds(low[i], epoch_) && holds(high[i], epoch_));
                data[i].x = is_own ? own.x : payload_of(low[i].first);
                data[i].y = is_own ? own.y : payload_of(low[i].second);
                data[i].z = is_own ? own.z : payload_of(high[i].first);
                data[i].w = is_own ? own.w : payload_of(high[i].second);
            }
            if (all) return;
            patience.wait();
        }
    }

  private:
    __device__ __forceinline__ char* address(int owner, int source, int lane) const {
        char* base = static_cast<char*>(params_.staging[owner]);
        return base + row_offset_ + source * source_stride_ + static_cast<int64_t>(lane) * kPacketBytes;
    }

    const Params& params_;
    uint32_t epoch_;
    int lanes_;
    int64_t source_stride_, row_offset_;
};

}  // namespace tokenspeed::comm
