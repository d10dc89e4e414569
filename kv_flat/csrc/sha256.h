// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kv_flat/csrc/digest.h"

namespace tokenspeed::kv_flat {

/// Incremental SHA-256 (FIPS 180-4). Uses the SHA extensions of x86-64 where the processor has them.
class Sha256 {
  public:
    Sha256() noexcept;

    void update(std::span<const std::uint8_t> data) noexcept;

    /// Ends the message. The object must not be used afterwards.
    [[nodiscard]] Digest finish() noexcept;

    static constexpr std::size_t kBlockBytes = 64;

  private:
    std::array<std::uint32_t, 8> state_;
    std::array<std::uint8_t, kBlockBytes> pending_{};
    std::size_t pending_bytes_ = 0;
    std::uint64_t total_bytes_ = 0;
};

namespace sha256_detail {

using Compress = void (*)(std::array<std::uint32_t, 8>& state, const std::uint8_t* blocks, std::size_t num_blocks);

void compress_portable(std::array<std::uint32_t, 8>& state, const std::uint8_t* blocks, std::size_t num_blocks);

/// The fastest compression function of this processor, chosen once.
[[nodiscard]] Compress fastest_compress() noexcept;

}  // namespace sha256_detail

}  // namespace tokenspeed::kv_flat
