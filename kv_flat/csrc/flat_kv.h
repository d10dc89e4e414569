// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv_flat/csrc/block_key.h"
#include "kv_flat/csrc/block_pool.h"
#include "kv_flat/csrc/group_spec.h"
#include "kv_flat/csrc/joint_match.h"
#include "kv_flat/csrc/kv_sequence.h"
#include "kv_flat/csrc/lost_tokens.h"

namespace tokenspeed::kv_flat {

struct KvConfig {
    std::uint32_t num_blocks = 0;        ///< the null block included
    std::uint32_t key_tokens = 0;        ///< tokens per logical block, each with a key; divides every group's block
    std::uint32_t in_flight_tokens = 0;  ///< most tokens of one sequence that are computed but not confirmed
    bool prefix_caching = true;
    bool record_events = false;
    double residency_sample_rate = 0.0;  ///< share of blocks whose lives are followed; 0: off
    EvictionSpec eviction;
    std::vector<GroupSpec> groups;  ///< none: a model that keeps no KV (encoders), whose sequences hold no blocks
};

/// The flat KV manager: one pool under any number of groups. Knows sequences of tokens, not requests.
///
/// Verbs that read: probe, blocks_to_*. Verbs that take are all-or-nothing over all groups: open, extend.
class FlatKv {
  public:
    /// Throws std::invalid_argument naming the field, its value and what is allowed.
    explicit FlatKv(KvConfig config);

    [[nodiscard]] const KvConfig& config() const noexcept { return config_; }
    [[nodiscard]] BlockPool& pool() noexcept { return pool_; }
    [[nodiscard]] const BlockPool& pool() const noexcept { return pool_; }

    /// A step is about to be planned: what was published so far is written before it runs.
    void begin_step() noexcept { clock_.begin_step(); }

    /// The longest cached prefix, at most `max_tokens` long.
    /// @param drop_last give up the last logical block of it (some drafters need its hidden states computed)
    /// @param end where it may end
    [[nodiscard]] Match probe(std::span<const Digest> keys, std::uint32_t max_tokens, bool drop_last = false,
                              MatchEnd end = MatchEnd::kLogicalBlock) const;

    /// No match: for a sequence that must not read the cache.
    [[nodiscard]] Match no_match() const;

    /// Blocks that a sequence of `num_tokens` may hold at once, over all groups.
    [[nodiscard]] std::uint32_t max_held_blocks(std::uint32_t num_tokens) const noexcept;

    /// The same when it is computed in the smallest steps: less than this can never hold it.
    [[nodiscard]] std::uint32_t least_held_blocks(std::uint32_t num_tokens) const noexcept;

    /// Blocks that `open(match)` and growth to `num_tokens` will take out of the free queue, at most.
    [[nodiscard]] std::uint32_t blocks_to_open(const Match& match, std::uint32_t num_tokens) const noexcept;

    /// Blocks that `extend(sequence, num_tokens)` will take.
    [[nodiscard]] std::uint32_t blocks_to_extend(const KvSequence& sequence, std::uint32_t num_tokens) const noexcept {
        return num_tokens <= sequence.covered_tokens_ ? 0 : num_missing_blocks(sequence, num_tokens);
    }

    /// The largest length, at most `num_tokens`, to which `num_blocks` more blocks extend the sequence.
    [[nodiscard]] std::uint32_t fitting_tokens(const KvSequence& sequence, std::uint32_t num_tokens,
                                               std::uint32_t num_blocks) const noexcept;

    /// Blocks that a sequence may still take until it holds all of `num_tokens`.
    [[nodiscard]] std::uint32_t blocks_to_complete(const KvSequence& sequence, std::uint32_t num_tokens) const noexcept;

    /// Adopts a match that was probed since the pool last changed. Where it ends inside a block, the sequence writes on
    /// in that block if nobody would notice, and in a copy of it otherwise.
    /// @pre blocks_to_open(match, match.num_tokens) <= pool().num_free()
    /// @param session the client's session, as a number; 0: not known
    [[nodiscard]] KvSequence open(const Match& match, std::uint64_t session = 0);

    /// A sequence gives its blocks back while the result lives; what is known of it tells the eviction policy what they
    /// are worth.
    [[nodiscard]] BlockPool::Run depart(const Departure& departure) { return pool_.open_run(departure); }

    /// Tokens right behind what was found that had been computed before, by why they are lost. O(those keys).
    /// @param max_tokens no more could have been found
    /// @param num_found_tokens what a match or a store gave; a multiple of the key
    [[nodiscard]] LostTokens lost_tokens(std::span<const Digest> keys, std::uint32_t max_tokens,
                                         std::uint32_t num_found_tokens) const noexcept;

    /// Keys that a pool of this size can hold.
    [[nodiscard]] std::uint32_t max_keys() const noexcept;

    /// Appends blocks until every table covers `num_tokens`. False, and no change, when the pool has too few.
    [[nodiscard]] bool extend(KvSequence& sequence, std::uint32_t num_tokens) {
        return num_tokens <= sequence.covered_tokens_ || grow(sequence, num_tokens);
    }

    /// Free blocks that `open(match)` and then `extend_loaded(..., num_tokens)` take, at most.
    [[nodiscard]] std::uint32_t blocks_to_load(const Match& match, std::uint32_t num_tokens,
                                               std::uint32_t num_computed_tokens) const noexcept;

    /// Makes room for KV that comes from elsewhere: tables cover `num_tokens`, without the blocks that no token at or
    /// after `num_computed_tokens` reads. @pre blocks_to_load(...) <= pool().num_free()
    void extend_loaded(KvSequence& sequence, std::uint32_t num_tokens, std::uint32_t num_computed_tokens);

    /// Gives back the blocks that no token at or after `num_computed_tokens` reads. Steps run in order, so a state is
    /// needed no longer than until a step from a later one on is planned: behind `num_planned_tokens`.
    void retire(KvSequence& sequence, std::uint32_t num_computed_tokens, std::uint32_t num_planned_tokens) noexcept {
        if (has_dying_blocks_) retire_dead(sequence, num_computed_tokens, num_planned_tokens);
    }

    /// Whether blocks of a sequence die while it goes on (windows, states), so that each step looks into its tables.
    [[nodiscard]] bool has_dying_blocks() const noexcept { return has_dying_blocks_; }

    // -- states
    // --------------------------------------------------------------------------------------------------------
    //
    // Workers read the state behind n tokens from column ceil(n / B) - 1 and write the one behind a step's last token
    // into its column, moving it over first when the two differ. A state that can be hit is never written again.

    /// Tokens of a block in the groups that keep states, 0 when none does.
    [[nodiscard]] std::uint32_t state_block_tokens() const noexcept { return state_block_tokens_; }

    /// A planned step leaves the states behind `num_tokens` tokens: they may become hittable.
    /// @param is_wanted worth a copy each, if the next step goes on in their columns
    void note_states(KvSequence& sequence, std::uint32_t num_tokens, bool is_wanted) noexcept;

    /// Makes the states hittable that note_states named, before a step up to `end_tokens` goes on from them. Where that
    /// step would replace one, a copy is kept if one of `num_spare_blocks` is left for it, and nothing otherwise.
    /// @returns states that were wanted and not kept
    std::uint32_t keep_states(KvSequence& sequence, const KeyChain& chain, std::span<const TokenId> tokens,
                              std::uint32_t end_tokens, std::uint32_t num_spare_blocks);

    /// Makes the logical blocks of the first `num_tokens` tokens hittable.
    /// @param chain keys of the sequence, at least up to num_tokens
    /// @param tokens the sequence's ids, for events
    void publish(KvSequence& sequence, const KeyChain& chain, std::span<const TokenId> tokens,
                 std::uint32_t num_tokens) {
        if (completes_keys(sequence, num_tokens)) publish_complete(sequence, chain, tokens, num_tokens);
    }

    /// Whether `publish` may have something to do.
    [[nodiscard]] bool completes_keys(const KvSequence& sequence, std::uint32_t num_tokens) const noexcept {
        return num_tokens >= sequence.settled_tokens_;
    }

    /// Records the event that logical block `unit` of a sequence can be hit in `group`.
    void record_stored(const KeyChain& chain, std::span<const TokenId> tokens, GroupId group, std::uint32_t unit);

    /// Adds the sequence's shares to `owners`, which is indexed by block. For integrity checks.
    static void count_owners(const KvSequence& sequence, std::vector<std::uint32_t>& owners);

  private:
    [[nodiscard]] std::uint32_t held_blocks(std::uint32_t num_tokens, std::uint32_t in_flight_tokens) const noexcept;
    /// Logical blocks of the match that its last block in `group` holds, 0 when it holds them all and is shared.
    [[nodiscard]] std::uint32_t num_tail_units(const Match& match, GroupId group) const noexcept {
        return match.num_tokens % config_.groups[group].block_tokens / config_.key_tokens;
    }
    void own_match(KvSequence& sequence, const Match& match);
    [[nodiscard]] std::uint32_t num_missing(const KvSequence& sequence, GroupId group,
                                            std::uint32_t num_tokens) const noexcept;
    [[nodiscard]] std::uint32_t num_missing_blocks(const KvSequence& sequence, std::uint32_t num_tokens) const noexcept;
    [[nodiscard]] bool grow(KvSequence& sequence, std::uint32_t num_tokens);
    void retire_dead(KvSequence& sequence, std::uint32_t num_computed_tokens,
                     std::uint32_t num_planned_tokens) noexcept;
    void publish_complete(KvSequence& sequence, const KeyChain& chain, std::span<const TokenId> tokens,
                          std::uint32_t num_tokens);
    /// Finds out anew up to which lengths the tables need not be asked.
    void note_lengths(KvSequence& sequence) const noexcept;
    void extend_state(KvSequence& sequence, GroupId group, std::uint32_t num_columns);
    void publish_state(BlockId block, GroupId group, const KeyChain& chain, std::span<const TokenId> tokens,
                       std::uint32_t num_tokens);
    /// Makes a state hittable that the next step does not replace.
    void publish_whole_state(KvSequence::Column& column, GroupId group, const KeyChain& chain,
                             std::span<const TokenId> tokens, std::uint32_t num_complete);

    KvConfig config_;
    std::uint32_t state_block_tokens_;
    bool has_dying_blocks_;
    BlockPool pool_;
    WriteClock clock_;
    JointMatcher matcher_;
};

}  // namespace tokenspeed::kv_flat
