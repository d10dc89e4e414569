// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "scheduler_fsm/csrc/encoder_cache.h"

namespace tokenspeed::scheduler_fsm {

/// Positions [begin, end) of a prompt.
struct TokenRange {
    std::uint32_t begin = 0;
    std::uint32_t end = 0;
};

/// An encoder input as it arrives: an image, say, and the place in the prompt that its embeddings take.
struct EncoderInputSpec {
    std::string identifier;
    TokenRange place;
    std::vector<TokenRange> embeds;  ///< the positions of `place` that take an embedding, in order

    [[nodiscard]] std::uint32_t num_embeds() const noexcept {
        std::uint32_t sum = 0;
        for (const TokenRange& range : embeds) sum += range.end - range.begin;
        return sum;
    }
};

/// What a step and the worker can take. Embeddings are counted as vLLM counts them.
struct EncoderLimits {
    std::uint32_t step_embeds = 0;   ///< embeddings computed in one step
    std::uint32_t cache_embeds = 0;  ///< embeddings that the worker keeps
    bool split_inputs = true;        ///< a chunk may end inside an input
    std::uint32_t step_tokens = 0;   ///< tokens of one chunk at most; bounds inputs that may not be split
};

inline constexpr std::uint32_t kNoPosition = std::numeric_limits<std::uint32_t>::max();

/// One input of a request that is in.
struct EncoderInput {
    std::uint32_t number = 0;  ///< in the order in which they arrived
    TokenRange place;
    TokenRange whole;  ///< its place, joined with those of the inputs that overlap it
    std::vector<TokenRange> embeds;
    EncoderName name;
    EncoderRef ref;

    /// The first position at or after `begin` that takes one of its embeddings, or kNoPosition.
    [[nodiscard]] std::uint32_t next_embed(std::uint32_t begin) const noexcept;
};

/// The encoder inputs of one request, by begin of their place.
class EncoderInputs {
  public:
    /// Why a prompt with these inputs can never run; empty when it can.
    [[nodiscard]] static std::optional<std::string> refusal(const std::vector<EncoderInputSpec>& specs,
                                                            std::uint32_t num_prompt_tokens,
                                                            const EncoderLimits& limits, const EncoderCache& cache);

    /// @pre refusal(...) is empty
    EncoderInputs(std::vector<EncoderInputSpec> specs, EncoderCache& cache);

    [[nodiscard]] std::vector<EncoderInput>& items() noexcept { return items_; }
    [[nodiscard]] const std::vector<EncoderInput>& items() const noexcept { return items_; }

    /// The first input that may reach past `position`; all before it end there or earlier.
    [[nodiscard]] std::size_t first_after(std::uint32_t position) const noexcept;

    /// Drops the references to inputs whose place ends at or before `num_computed_tokens`; true when none is left.
    bool let_go(std::uint32_t num_computed_tokens) noexcept;

    /// Those whose place ends at or before `num_computed_tokens`, each once since it began or was restarted.
    [[nodiscard]] std::span<const EncoderInput> take_consumed(std::uint32_t num_computed_tokens) noexcept;
    void restart() noexcept { num_consumed_ = 0; }

  private:
    void join_overlapping() noexcept;

    std::vector<EncoderInput> items_;
    std::size_t num_consumed_ = 0;
};

}  // namespace tokenspeed::scheduler_fsm
