// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace tokenspeed::kv_flat {
namespace sha256_detail {
namespace {

// First 32 bits of the fractional parts of the cube roots of the first 64 primes (FIPS 180-4, 4.2.2).
alignas(16) constexpr std::array<std::uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t load_big_endian(const std::uint8_t* bytes) noexcept {
    return (std::uint32_t{bytes[0]} << 24U) | (std::uint32_t{bytes[1]} << 16U) | (std::uint32_t{bytes[2]} << 8U) |
           std::uint32_t{bytes[3]};
}

}  // namespace

void compress_portable(std::array<std::uint32_t, 8>& state, const std::uint8_t* blocks, std::size_t num_blocks) {
    std::array<std::uint32_t, 64> w{};
    for (; num_blocks > 0; --num_blocks, blocks += Sha256::kBlockBytes) {
        for (std::size_t t = 0; t < 16; ++t) w[t] = load_big_endian(blocks + 4 * t);
        for (std::size_t t = 16; t < 64; ++t) {
            const auto s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3U);
            const auto s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10U);
            w[t] = w[t - 16] + s0 + w[t - 7] + s1;
        }
        auto [a, b, c, d, e, f, g, h] = state;
        for (std::size_t t = 0; t < 64; ++t) {
            const auto sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
            const auto sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
            const auto t1 = h + sum1 + ((e & f) ^ (~e & g)) + kRound[t] + w[t];
            const auto t2 = sum0 + ((a & b) ^ (a & c) ^ (b & c));
            h = g;
            g = f;
            f = e;
            e = d + t1;
            d = c;
            c = b;
            b = a;
            a = t1 + t2;
        }
        const std::array<std::uint32_t, 8> mixed = {a, b, c, d, e, f, g, h};
        for (std::size_t i = 0; i < 8; ++i) state[i] += mixed[i];
    }
}

#if defined(__x86_64__)
namespace {

// The instructions want the state as (a, b, e, f) and (c, d, g, h), high lane first.
__attribute__((target("sha,sse4.1"))) void compress_sha_extensions(std::array<std::uint32_t, 8>& state,
                                                                   const std::uint8_t* blocks, std::size_t num_blocks) {
    const __m128i byte_swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    const auto* words = reinterpret_cast<const __m128i*>(state.data());
    const __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xB1);
    const __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1B);
    __m128i abef = _mm_alignr_epi8(badc, hgfe, 8);
    __m128i cdgh = _mm_blend_epi16(hgfe, badc, 0xF0);

    for (; num_blocks > 0; --num_blocks, blocks += Sha256::kBlockBytes) {
        const __m128i abef_before = abef;
        const __m128i cdgh_before = cdgh;
        __m128i w[4];  // a ring of the last 16 message words
#pragma GCC unroll 16
        for (unsigned group = 0; group < 16; ++group) {
            __m128i& oldest = w[group % 4];
            if (group < 4) {
                const auto* source = reinterpret_cast<const __m128i*>(blocks) + group;
                oldest = _mm_shuffle_epi8(_mm_loadu_si128(source), byte_swap);
            } else {
                const __m128i newest = w[(group + 3) % 4];
                const __m128i seven_back = _mm_alignr_epi8(newest, w[(group + 2) % 4], 4);
                const __m128i partial = _mm_add_epi32(_mm_sha256msg1_epu32(oldest, w[(group + 1) % 4]), seven_back);
                oldest = _mm_sha256msg2_epu32(partial, newest);
            }
            const auto* round = reinterpret_cast<const __m128i*>(kRound.data()) + group;
            const __m128i sum = _mm_add_epi32(oldest, _mm_load_si128(round));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }

    const __m128i feba = _mm_shuffle_epi32(abef, 0x1B);
    const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xB1);
    auto* out = reinterpret_cast<__m128i*>(state.data());
    _mm_storeu_si128(out, _mm_blend_epi16(feba, dchg, 0xF0));
    _mm_storeu_si128(out + 1, _mm_alignr_epi8(dchg, feba, 8));
}

bool has_sha_extensions() noexcept {
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    constexpr unsigned kShaBit = 1U << 29U;
    constexpr unsigned kSse41Bit = 1U << 19U;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & kSse41Bit) == 0) return false;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (ebx & kShaBit) != 0;
}

}  // namespace

Compress fastest_compress() noexcept {
    static const Compress chosen = has_sha_extensions() ? compress_sha_extensions : compress_portable;
    return chosen;
}
#else
Compress fastest_compress() noexcept { return compress_portable; }
#endif

}  // namespace sha256_detail

Sha256::Sha256() noexcept
    : state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19} {}

void Sha256::update(std::span<const std::uint8_t> data) noexcept {
    const auto compress = sha256_detail::fastest_compress();
    total_bytes_ += data.size();
    if (pending_bytes_ > 0) {
        const std::size_t head = std::min(data.size(), kBlockBytes - pending_bytes_);
        std::memcpy(pending_.data() + pending_bytes_, data.data(), head);
        pending_bytes_ += head;
        data = data.subspan(head);
        if (pending_bytes_ < kBlockBytes) return;
        compress(state_, pending_.data(), 1);
        pending_bytes_ = 0;
    }
    const std::size_t whole = data.size() / kBlockBytes;
    compress(state_, data.data(), whole);
    data = data.subspan(whole * kBlockBytes);
    if (!data.empty()) std::memcpy(pending_.data(), data.data(), data.size());
    pending_bytes_ = data.size();
}

Digest Sha256::finish() noexcept {
    // Padding: a one bit, zeros, the length in bits as a big-endian 64-bit number.
    std::array<std::uint8_t, 2 * kBlockBytes> tail{};
    std::memcpy(tail.data(), pending_.data(), pending_bytes_);
    tail[pending_bytes_] = 0x80;
    const std::size_t num_blocks = pending_bytes_ + 9 <= kBlockBytes ? 1 : 2;
    const std::uint64_t total_bits = total_bytes_ * 8;
    for (std::size_t i = 0; i < 8; ++i) {
        tail[num_blocks * kBlockBytes - 1 - i] = static_cast<std::uint8_t>(total_bits >> (8 * i));
    }
    sha256_detail::fastest_compress()(state_, tail.data(), num_blocks);

    Digest digest;
    for (std::size_t i = 0; i < 32; ++i) {
        digest.bytes[i] = static_cast<std::uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
    }
    return digest;
}

}  // namespace tokenspeed::kv_flat
