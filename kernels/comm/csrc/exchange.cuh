// SPDX-License-Identifier: Apache-2.0
// How ranks exchange rows: every rank writes its row into the staging memory of every other rank, and reads its own.
//
// Staging memory is blank until a row arrives: every 32-bit word of it holds kBlank, which no row that is sent
// contains. A word is written and read as one aligned scalar, so a reader that sees anything else has the payload.
// There is no fence, no flag and no barrier; only the reader waits, on its own memory. (FlashInfer's and TensorRT-LLM's
// one-shot all-reduces rest on the same property, with a negative zero as their blank.)
//
// Why three slots suffice. Call k of a row uses slot k mod 3 and makes slot (k + 2) mod 3 blank: call k - 1 used it,
// call k + 2 will. Let A be a rank that writes to B.
//   1. Nothing unread is made blank. B's launch for call k does nothing before B's launch for call k - 1 has ended (one
//      stream, or streams that wait for each other; a launch that starts early waits inside), and that ended only after
//      its threads had read all words of call k - 1: their values are in its output.
//   2. What A writes is not made blank later. A writes call k + 2 after A's launch for call k + 1 has ended, which read
//      the words of call k + 1 of all ranks, B's among them. B wrote those after its launch for call k had ended, and
//      all that launch had made blank was blank then.
//   3. Nothing unread is overwritten. A writes into the slot of call k again at call k + 3; by 2 that is after B's
//      launch for call k + 1 had ended, so after B's launch for call k.
// By 2 a word of the slot of call k that is not blank holds call k. Rows are independent: the argument uses the calls
// that contain this row, which are the same ones on all ranks when the ranks make the same calls in the same order,
// whatever other rows these calls have. Every rank keeps the slot of a row itself, in memory of its own device, so a
// replayed graph goes on where it was.
//
// Nobody waits for ever: all blocks of a launch run at once, a block sends a row before it waits for any that it sends
// later, and it takes its rows in ascending order. So the first row that some rank waits for has been sent.
#pragma once

#include <stdint.h>

#include "params.cuh"

namespace tokenspeed::comm {

// Two NaNs with all bits set; each byte is the same, so cudaMemset can write it.
constexpr uint32_t kBlank = 0xffffffffu;
constexpr int kBlankByte = 0xff;
constexpr uint32_t kNotBlank = 0x7fffffffu;  // two NaNs, too

__device__ __forceinline__ uint32_t never_blank(uint32_t word) { return word == kBlank ? kNotBlank : word; }

__device__ __forceinline__ bool arrived(const uint4& words) {
    return words.x != kBlank && words.y != kBlank && words.z != kBlank && words.w != kBlank;
}

// Four accesses of 32 bits for the memory model; nothing is assumed about their order.
__device__ __forceinline__ void write_words(char* address, const uint4& words) {
    asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(words.x), "r"(words.y),
                 "r"(words.z), "r"(words.w)
                 : "memory");
}

__device__ __forceinline__ uint4 read_words(const char* address) {
    uint4 words;
    asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(address)
                 : "memory");
    return words;
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
template <int kRanks>
class RowExchange {
  public:
    __device__ RowExchange(const Params& params, int row, uint32_t slot) : params_(params) {
        const int64_t bytes = row_bytes(params.hidden);
        source_stride_ = params.max_rows * bytes;
        row_offset_ = slot_offset(slot) + row * bytes;
        next_offset_ = slot_offset((slot + 2) % kSlots) + row * bytes;
    }

    // Writes 16 bytes of this rank's row to every other rank.
    __device__ __forceinline__ void send(int lane, const uint4& data) const {
        const uint4 words =
            make_uint4(never_blank(data.x), never_blank(data.y), never_blank(data.z), never_blank(data.w));
#pragma unroll
        for (int step = 1; step < kRanks; ++step) {
            const int peer = (params_.rank + step) % kRanks;  // each rank starts with another one
            write_words(address(row_offset_, peer, params_.rank, lane), words);
        }
    }

    // Makes 16 bytes of every other rank's place blank for the call after the next one.
    __device__ __forceinline__ void make_blank(int lane) const {
#pragma unroll
        for (int step = 1; step < kRanks; ++step) {
            const int source = (params_.rank + step) % kRanks;
            write_words(address(next_offset_, params_.rank, source, lane), make_uint4(kBlank, kBlank, kBlank, kBlank));
        }
    }

    // Reads 16 bytes of the rows of kCount ranks from `first` on, this rank's from `own`; waits until they are there.
    // All words are asked for before any is looked at, so their latencies overlap.
    template <int kCount>
    __device__ __forceinline__ void receive(int lane, int first, const uint4& own, uint4 (&data)[kCount]) const {
        Patience patience(params_.timeout_ns);
        while (true) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                // This rank's own place, if there is one, stays blank; what it holds is not looked at.
                if (num_places(kRanks) > 1 || first + i != params_.rank) {
                    data[i] = read_words(address(row_offset_, params_.rank, first + i, lane));
                }
            }
            bool all = true;
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                if (first + i == params_.rank) {
                    data[i] = own;
                } else {
                    all &= arrived(data[i]);
                }
            }
            if (all) return;
            patience.wait();
        }
    }

  private:
    __device__ __forceinline__ int64_t slot_offset(uint32_t slot) const {
        return static_cast<int64_t>(slot) * num_places(kRanks) * source_stride_;
    }

    __device__ __forceinline__ char* address(int64_t offset, int owner, int source, int lane) const {
        char* base = static_cast<char*>(params_.staging[owner]);
        const int place = num_places(kRanks) == 1 ? 0 : source;
        return base + offset + place * source_stride_ + static_cast<int64_t>(lane) * kLaneBytes;
    }

    const Params& params_;
    int64_t source_stride_, row_offset_, next_offset_;
};

}  // namespace tokenspeed::comm
