// SPDX-License-Identifier: Apache-2.0
// Launch parameters of the product of a few rows.
#pragma once

#include <stdint.h>

namespace tokenspeed::linear {

constexpr int kMaxRows = 16;         // two tiles of X, see few_rows.cuh
constexpr int kDependentLaunch = 1;  // start before the previous kernel has ended

// Everything a launch needs; mirrored field by field in abi.py.
struct Params {
    const void* rows_in;                // [num_rows, in] bf16
    const void* weight;                 // [out, in] bf16
    const void* bias;                   // [out] bf16; null: there is none
    void* rows_out;                     // [num_rows, out] bf16, packed
    int64_t row_stride, weight_stride;  // elements between rows
    int32_t num_rows, in_values, out_values;
    int32_t launch_flags;  // kDependentLaunch
};

}  // namespace tokenspeed::linear
