// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kv_flat/csrc/digest.h"

namespace tokenspeed::kv_flat {

using TokenId = std::int32_t;

/// Goes into the first key of every chain. Change it with any change of the encoding below, so that stores never mix.
inline constexpr std::string_view kKeyFormat = "tokenspeed-kv/2";

/// A span of the prompt whose content is not given by its token ids (an image, say): [begin, end) in tokens.
struct ContentSpan {
    std::uint32_t begin_tokens = 0;
    std::uint32_t end_tokens = 0;
    std::string content_id;
};

/// Everything besides token ids that makes two prompts differ.
struct KeyContext {
    std::string salt;     ///< tenant isolation (`cache_salt`); empty is "none"
    std::string adapter;  ///< LoRA adapter name; empty is "none"
    std::vector<ContentSpan> spans;
    /// Tokens behind a block that its key names as well: what a drafter keeps of the block's last token depends on
    /// them.
    std::uint32_t lookahead_tokens = 0;
};

/// The chain of block keys of one token sequence.
///
///   root  = H( frame(format) u32(key_tokens) frame(salt) frame(adapter) )
///   key_i = H( key_{i-1} u32(token)*key_tokens u32(num_spans)
///              { i64(begin - block begin) u32(length) frame(content_id) }* )
///
/// With lookahead the root ends in u8(kind) u32(lookahead_tokens), and a key also takes in the tokens behind its block
/// and the spans that reach into them; it exists once they are known.
///
/// H = SHA-256, key_{-1} = root, numbers little-endian, frame(x) = u8(kind) u32(bytes) x; the spans of a block are
/// those that touch it, by begin. Every field has a fixed
/// place or a length in front, so no two different inputs have the same encoding. A key names all tokens up to the end
/// of its block.
class KeyChain {
  public:
    KeyChain() = default;
    KeyChain(std::uint32_t key_tokens, KeyContext context);

    /// Appends the keys of all whole blocks of `tokens` that are not there yet. `tokens` is the sequence from its
    /// start.
    void extend(std::span<const TokenId> tokens) {
        if (is_due(tokens.size())) append_keys(tokens);
    }
    /// Whether so many tokens give a key that is not there yet.
    [[nodiscard]] bool is_due(std::size_t num_tokens) const noexcept { return num_tokens >= next_key_at_tokens_; }

    /// Forgets the keys of blocks that end after `num_tokens` (a sequence that was cut).
    void truncate(std::uint32_t num_tokens);

    [[nodiscard]] std::span<const Digest> keys() const noexcept { return keys_; }
    [[nodiscard]] const Digest& root() const noexcept { return root_; }
    [[nodiscard]] std::uint32_t key_tokens() const noexcept { return key_tokens_; }

  private:
    static constexpr std::uint32_t kNever = std::numeric_limits<std::uint32_t>::max();

    void append_keys(std::span<const TokenId> tokens);
    [[nodiscard]] std::size_t num_keys_of(std::size_t num_tokens) const noexcept;
    /// @param named the block's tokens and those of its lookahead
    [[nodiscard]] Digest next_key(std::span<const TokenId> named, std::uint32_t begin_tokens);

    // Changes whenever the number of keys does.
    void note_next_key() noexcept {
        const std::size_t end = (keys_.size() + 1) * key_tokens_ + lookahead_tokens_;
        next_key_at_tokens_ = static_cast<std::uint32_t>(std::min<std::size_t>(end, kNever));
    }

    std::uint32_t key_tokens_ = 0;               // 0: no prefix caching, no keys
    std::uint32_t next_key_at_tokens_ = kNever;  // so many tokens are needed for the next key
    std::uint32_t lookahead_tokens_ = 0;
    Digest root_;
    std::vector<ContentSpan> spans_;  // by begin
    std::size_t first_span_ = 0;      // those before it end before the next key's block
    std::vector<Digest> keys_;
};

}  // namespace tokenspeed::kv_flat
