// SPDX-License-Identifier: Apache-2.0
// Launch parameters and the map of the staging memory of the collective kernels.
#pragma once

#include <stdint.h>

namespace tokenspeed::comm {

constexpr int kMaxRanks = 8;
constexpr int kLaneElements = 8;     // elements of 16 bits in one access
constexpr int kLaneBytes = 16;       // of one access
constexpr int kMaxThreads = 512;     // of a block, which has one row
constexpr int kMaxLanes = 2048;      // accesses of a row: up to 16384 elements
constexpr int kSlots = 3;            // calls of one row that have memory of their own, see exchange.cuh
constexpr int kDependentLaunch = 1;  // start before the previous kernel has drained
constexpr int kFewRows = 32;         // up to so many the lines of the exchange are fetched, too

enum class ElementType : int32_t { kBfloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

// Everything a launch needs; mirrored field by field in abi.py.
struct Params {
    const void* branch;                      // [rows, hidden] this rank's term of the sum
    const void* other;                       // [rows, hidden] with one rank: a second term, packed; null: there is none
    const void* residual;                    // [rows, hidden]; null: there is none
    const void* weight;                      // [hidden]; null: there is none
    void* normed;                            // [rows, hidden]
    void* total;                             // [rows, hidden] residual plus sum
    void* staging[kMaxRanks];                // each rank's, as this device sees it
    uint32_t* last_slots;                    // [max_rows] slot of this rank's last call for a row; blank: none yet
    uint64_t timeout_ns;                     // how long a peer is waited for
    int64_t branch_stride, residual_stride;  // elements between rows
    int32_t rank, num_ranks;                 // one rank: the branch is the sum already, nothing is exchanged
    int32_t rows, hidden, max_rows;
    ElementType element_type, weight_type;  // the weight's: the elements' or fp32
    int32_t launch_flags;                   // kDependentLaunch
    int32_t most_blocks;                    // with many rows: blocks that run at once; 0: one block for each row
    float epsilon, weight_offset;           // the norm multiplies by weight + weight_offset
};

// A part of a sum that goes to the peer; mirrored in abi.py.
struct SentPart {
    const void* source;
    void* target;
    uint32_t* flag;  // the peer's, which is set to `value` behind the copy
    void* event;     // marks the end of the copy
    void* producer;  // stream that makes the source
    void* copies;    // streams for the copies and for the flags
    void* flags;
    int64_t num_bytes;
    uint32_t value;
};

// A part of a sum that a peer sends: rows `first` to `end`; mirrored in abi.py.
struct Arrival {
    const uint32_t* flag;  // this rank's, which the peer sets to `value` or a later one
    void* event;           // end of this rank's own copy of the part
    uint32_t value;
    int32_t first, end;
};

// Bytes of one row in one slot.
__host__ __device__ constexpr int64_t row_bytes(int hidden) {
    return static_cast<int64_t>(hidden / kLaneElements) * kLaneBytes;
}

// Places for the rows of other ranks: one between two, else one for each rank, which is cheaper to find.
__host__ __device__ constexpr int num_places(int num_ranks) { return num_ranks == 2 ? 1 : num_ranks; }

// Staging memory of one rank: [slot][place][row] of row_bytes each.
__host__ __device__ constexpr int64_t staging_bytes(int num_ranks, int max_rows, int hidden) {
    return kSlots * num_places(num_ranks) * static_cast<int64_t>(max_rows) * row_bytes(hidden);
}

}  // namespace tokenspeed::comm
