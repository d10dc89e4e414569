// SPDX-License-Identifier: Apache-2.0
// Reads `count` values of 16 bytes and keeps nothing.

#include <stdint.h>

constexpr int kThreads = 512;
constexpr int kInFlight = 8;

__global__ void __launch_bounds__(kThreads) sweep(const uint4* values, int64_t count, unsigned* sink) {
  unsigned seen = 0;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (; at + (kInFlight - 1) * stride < count; at += kInFlight * stride) {
    uint4 loaded[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) loaded[i] = __ldcs(values + at + i * stride);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) seen ^= loaded[i].x ^ loaded[i].y ^ loaded[i].z ^ loaded[i].w;
  }
  for (; at < count; at += stride) {
    const uint4 loaded = __ldcs(values + at);
    seen ^= loaded.x ^ loaded.y ^ loaded.z ^ loaded.w;
  }
  if (seen == 0x5EED5EEDu) *sink = seen;  // hardly ever; keeps the loads alive
}

extern "C" int read_sweep(const void* values, int64_t count, void* sink, int blocks, void* stream) {
  sweep<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<const uint4*>(values), count,
                                                                     static_cast<unsigned*>(sink));
  return static_cast<int>(cudaGetLastError());
}
