// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/fuzz/edge_map.h"

#include <algorithm>
#include <bit>

// Where the linker put the start of this file in memory: block addresses relative to it are the same in every run.
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start;

namespace tokenspeed::fuzz {
namespace {

std::array<std::uint8_t, EdgeMap::kNumSlots> hits;
std::uint32_t previous_block = 0;

std::uint32_t magnitude(std::uint8_t count) noexcept {
    if (count <= 3) return count - 1U;
    return std::min<std::uint32_t>(static_cast<std::uint32_t>(std::bit_width(count)), EdgeMap::kNumMagnitudes - 1);
}

}  // namespace

void EdgeMap::reset() noexcept {
    hits.fill(0);
    previous_block = 0;
}

std::vector<std::uint32_t> EdgeMap::features() {
    std::vector<std::uint32_t> found;
    for (std::uint32_t edge = 0; edge < kNumSlots; ++edge) {
        if (hits[edge] > 0) found.push_back(edge * kNumMagnitudes + magnitude(hits[edge]));
    }
    return found;
}

extern "C" void __sanitizer_cov_trace_pc() {
    const auto address = static_cast<const char*>(__builtin_return_address(0));
    const auto offset = static_cast<std::uint64_t>(address - &__ehdr_start);
    const auto block = static_cast<std::uint32_t>((offset * 0x9E3779B97F4A7C15ULL) >> 48U);
    std::uint8_t& count = hits[block ^ previous_block];
    count = static_cast<std::uint8_t>(count + (count < 255 ? 1 : 0));
    previous_block = block / 2;
}

}  // namespace tokenspeed::fuzz
