// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kv_flat/csrc/block_list.h"

namespace tokenspeed::kv_flat {

/// What the client said about its session. Advice: no hint can make a block unavailable.
struct SessionHints {
    std::uint64_t session = 0;  ///< a number for the session's name; 0 when the client gave none
    bool ends = false;          ///< this was the session's last turn
    double return_in_s = -1.0;  ///< when the next turn is expected, after this one ended; negative: not known
    double pin_s = 0.0;         ///< keep what this turn leaves, in preference to everything unpinned, for so long
};

/// What is known of a sequence when it gives its blocks back.
struct Departure {
    std::uint32_t num_prompt_tokens = 0;
    std::uint32_t num_output_tokens = 0;  ///< both 0: nothing is known, the sequence may be back at once
    SessionHints hints;
};

/// Why cached content was thrown out, by what it was thought to be worth. The last one counts the kinds.
enum class EvictionKind : std::uint8_t {
    kSuperseded,  ///< a later turn of its session had left it behind
    kEnded,       ///< its session had ended
    kIdle,        ///< nobody had come back for it for the longest time
    kExpected,    ///< its session was expected back later than any other
    kPinned,      ///< pinned, and nothing else was left
    kNumKinds,
};
using CountsByKind = std::array<std::uint64_t, static_cast<std::size_t>(EvictionKind::kNumKinds)>;

struct Victim {
    BlockId block = kNullBlock;
    EvictionKind kind = EvictionKind::kIdle;
};

/// Where a cached block stands that nobody owns.
struct IdleBlock {
    BlockId block = kNullBlock;
    EvictionKind kind = EvictionKind::kIdle;
    std::uint32_t run = 0;      ///< blocks of one number were left by one sequence
    std::uint32_t depth = 0;    ///< from the head of its run
    std::uint64_t session = 0;  ///< 0: not known
};

/// Names a policy and its weights.
///
/// `lru` knows only the time of release. `session` takes the time until somebody returns for a run of blocks to be
/// Lomax-distributed, so the rate of returns of one that was released `age` ago is proportional to 1 / (scale + age):
/// it evicts the largest scale + age first. With equal scales that is LRU. The scale is
///
///   idle_scale_s * (output_tokens / 200) ^ output_exponent * (prompt_tokens / 100 000) ^ prompt_exponent
///
/// The defaults are the maximum-likelihood fit to 80 coding-agent sessions (benchmarks/kv_replay.py).
struct EvictionSpec {
    std::string name = "session";
    double idle_scale_s = 18.0;
    double output_exponent = 0.5;
    double prompt_exponent = 0.4;
    bool superseded_first = true;
    bool use_hints = true;
};

/// Decides which cached block that nobody owns is given up next. Holds all of them, and only them.
class EvictionPolicy {
  public:
    EvictionPolicy() = default;
    EvictionPolicy(const EvictionPolicy&) = delete;
    EvictionPolicy& operator=(const EvictionPolicy&) = delete;
    virtual ~EvictionPolicy() = default;

    /// Blocks that are added until `close_run` come from one sequence, in the order in which they may go.
    virtual void open_run(const Departure& departure) = 0;
    virtual void close_run() noexcept = 0;

    /// Takes a block that lost its last owner.
    virtual void add(BlockId block) noexcept = 0;
    /// Gives up a block, because it found an owner.
    virtual void adopt(BlockId block) noexcept = 0;
    /// The blocks adopted since the last call belong to one sequence of this session (0: not known).
    virtual void settle(std::uint64_t session) noexcept = 0;
    /// Gives up a block, because it lost its content.
    virtual void remove(BlockId block) noexcept = 0;

    /// Gives up the block that is worth least.
    /// @pre it holds a block
    [[nodiscard]] virtual Victim pop() noexcept = 0;

    /// Time in seconds, from any start; never goes back.
    void set_time(double now_s) noexcept { now_s_ = now_s > now_s_ ? now_s : now_s_; }

    /// Blocks by the kind that they would count as if they were evicted now. O(1).
    [[nodiscard]] virtual CountsByKind num_blocks() const = 0;
    /// Where each block stands. O(blocks): for pictures.
    [[nodiscard]] virtual std::vector<IdleBlock> idle_blocks() const = 0;
    /// Bytes that the policy itself keeps per block of the pool.
    [[nodiscard]] virtual double bytes_per_block() const noexcept = 0;
    /// All blocks in the order in which `pop` would serve them. O(blocks): for tests and diagnosis.
    [[nodiscard]] virtual std::vector<BlockId> order() const = 0;

  protected:
    double now_s_ = 0.0;
};

/// Throws std::invalid_argument naming the field, its value and what is allowed.
/// @param links by block, shared with the pool; outlives the policy
[[nodiscard]] std::unique_ptr<EvictionPolicy> make_eviction_policy(const EvictionSpec& spec, BlockLinks& links);

}  // namespace tokenspeed::kv_flat
