// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/block_key.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "kv_flat/csrc/sha256.h"

namespace tokenspeed::kv_flat {
namespace {

enum class FrameKind : std::uint8_t { kFormat = 1, kSalt = 2, kAdapter = 3, kContent = 4, kLookahead = 5 };

template <typename Number>
void put_number(Sha256& hash, Number value) {
    std::array<std::uint8_t, sizeof(Number)> bytes{};
    for (std::size_t i = 0; i < sizeof(Number); ++i) {
        bytes[i] = static_cast<std::uint8_t>(static_cast<std::uint64_t>(value) >> (8 * i));
    }
    hash.update(bytes);
}

void put_frame(Sha256& hash, FrameKind kind, std::string_view text) {
    put_number(hash, static_cast<std::uint8_t>(kind));
    put_number(hash, static_cast<std::uint32_t>(text.size()));
    hash.update({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
}

void put_tokens(Sha256& hash, std::span<const TokenId> tokens) {
    if constexpr (std::endian::native == std::endian::little) {
        hash.update({reinterpret_cast<const std::uint8_t*>(tokens.data()), tokens.size_bytes()});
    } else {
        for (const TokenId token : tokens) put_number(hash, static_cast<std::uint32_t>(token));
    }
}

}  // namespace

KeyChain::KeyChain(std::uint32_t key_tokens, KeyContext context)
    : key_tokens_(key_tokens), lookahead_tokens_(context.lookahead_tokens), spans_(std::move(context.spans)) {
    std::ranges::stable_sort(spans_, {}, &ContentSpan::begin_tokens);
    Sha256 hash;
    put_frame(hash, FrameKind::kFormat, kKeyFormat);
    put_number(hash, key_tokens);
    put_frame(hash, FrameKind::kSalt, context.salt);
    put_frame(hash, FrameKind::kAdapter, context.adapter);
    if (lookahead_tokens_ > 0) {
        put_number(hash, static_cast<std::uint8_t>(FrameKind::kLookahead));
        put_number(hash, lookahead_tokens_);
    }
    root_ = hash.finish();
    if (key_tokens_ > 0) note_next_key();
}

void KeyChain::append_keys(std::span<const TokenId> tokens) {
    if (key_tokens_ == 0) return;
    const std::size_t num_keys = num_keys_of(tokens.size());
    // Room for a whole prompt at once. It must not be given out key by key: each time would copy all keys.
    if (keys_.empty()) keys_.reserve(num_keys);
    while (keys_.size() < num_keys) {
        const std::size_t begin = keys_.size() * key_tokens_;
        keys_.push_back(
            next_key(tokens.subspan(begin, key_tokens_ + lookahead_tokens_), static_cast<std::uint32_t>(begin)));
    }
    note_next_key();
}

void KeyChain::truncate(std::uint32_t num_tokens) {
    if (key_tokens_ == 0) return;
    const std::size_t num_keys = num_keys_of(num_tokens);
    if (num_keys >= keys_.size()) return;
    keys_.resize(num_keys);
    note_next_key();
    first_span_ = 0;
}

std::size_t KeyChain::num_keys_of(std::size_t num_tokens) const noexcept {
    return num_tokens > lookahead_tokens_ ? (num_tokens - lookahead_tokens_) / key_tokens_ : 0;
}

Digest KeyChain::next_key(std::span<const TokenId> named, std::uint32_t begin_tokens) {
    Sha256 hash;
    hash.update(keys_.empty() ? root_.bytes : keys_.back().bytes);
    put_tokens(hash, named);

    const std::uint32_t end_tokens = begin_tokens + static_cast<std::uint32_t>(named.size());
    while (first_span_ < spans_.size() && spans_[first_span_].end_tokens <= begin_tokens) ++first_span_;
    std::size_t last = first_span_;
    while (last < spans_.size() && spans_[last].begin_tokens < end_tokens) ++last;
    const auto candidates = std::span(spans_).subspan(first_span_, last - first_span_);
    const auto touches = [begin_tokens](const ContentSpan& span) { return span.end_tokens > begin_tokens; };
    put_number(hash, static_cast<std::uint32_t>(std::ranges::count_if(candidates, touches)));
    for (const ContentSpan& span : candidates) {
        if (!touches(span)) continue;
        put_number(hash, std::int64_t{span.begin_tokens} - std::int64_t{begin_tokens});
        put_number(hash, span.end_tokens - span.begin_tokens);
        put_frame(hash, FrameKind::kContent, span.content_id);
    }
    return hash.finish();
}

}  // namespace tokenspeed::kv_flat
